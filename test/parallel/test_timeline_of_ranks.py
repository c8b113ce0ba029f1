"""Timelines of real ranks, and the report that is made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import HERE, run_ranks

from perseus.report.analysis import steps, waiting
from perseus.report.trace import read_all

pytest.importorskip("torch")

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that programs/timeline.py left, all of it in order."""
    path = tmp_path_factory.mktemp("Timeline")
    flags = ["--timeline-filename", "DYNAMIC", "env", "PERSEUS_TIMELINE_ALL_RANKS=1"]
    program = [sys.executable, str(HERE / "programs" / "timeline.py"), str(path), str(STEPS)]
    status, output = run_ranks(2, [*flags, *program])
    assert status == 0, output
    assert output.count("finished") == 2
    return path


def test_every_rank_has_a_file_for_each_recording(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {
        f"{name}{rank}.json" for name in ("a", "b", "train") for rank in ("", ".rank1")
    }
    for name in names:
        assert json.loads((folder / name).read_text())


def test_the_report_finds_the_steps_of_the_training(folder: Path) -> None:
    traces = read_all([folder / "train.json", folder / "train.rank1.json"])
    for trace in traces:
        assert len(steps(trace)) == STEPS
        assert {bucket.transport for bucket in trace.buckets} == {"shm"}
        assert trace.dropped == trace.never_agreed == 0
        gradients = [o for o in trace.operations if o.kind == "ALLREDUCE"]
        assert sorted(o.bytes for o in gradients) == sorted([2400, 120, 600, 20] * STEPS)
    assert waiting(traces).operations == 4 * STEPS + 4  # and four parameters were broadcast


def test_the_report_makes_its_page(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    from perseus.report.page import make_page

    page = make_page(read_all([folder / "train.json", folder / "train.rank1.json"]))
    assert page.count("data:image/png") == 4


def test_spans_of_a_row_nest_and_the_outer_one_comes_first(folder: Path) -> None:
    for name in ("train.json", "train.rank1.json"):
        rows: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for place, event in enumerate(json.loads((folder / name).read_text())):
            if event["ph"] == "X":
                begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
                row = rows.setdefault((event["pid"], event["tid"]), [])
                row.append((begin, -duration, place))
        assert len(rows) > 4
        for row in rows.values():
            around: list[tuple[int, int]] = []
            for begin, minus_duration, place in sorted(row):
                while around and around[-1][0] <= begin:
                    around.pop()
                end = begin - minus_duration
                if around:
                    assert end <= around[-1][0] and place > around[-1][1]
                around.append((end, place))
