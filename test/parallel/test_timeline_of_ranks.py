"""Timelines of real ranks, and the report that is made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import HERE, run_ranks

pytest.importorskip("torch")


def test_the_file_can_be_read_at_any_time(tmp_path: Path) -> None:
    program = str(HERE / "programs" / "timeline.py")
    command = ["--timeline-filename", "DYNAMIC", sys.executable, program, str(tmp_path)]
    status, output = run_ranks(2, command)
    assert status == 0, output
    assert output.count("finished") == 2


def test_the_report_of_a_training_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    from perseus.report.analysis import steps
    from perseus.report.page import make_page
    from perseus.report.trace import read_all

    example = HERE.parent.parent / "examples" / "pytorch_mnist.py"
    flags = ["--timeline-filename", str(tmp_path / "Trace.json"), "--timeline-mark-cycles"]
    all_ranks = ["env", "PERSEUS_TIMELINE_ALL_RANKS=1"]
    train = [sys.executable, str(example), "--epochs", "1"]
    status, output = run_ranks(2, [*flags, *all_ranks, *train])
    assert status == 0, output
    paths = [tmp_path / "Trace.json", tmp_path / "Trace.rank1.json"]
    assert sorted(tmp_path.iterdir()) == paths
    traces = read_all(paths)
    for trace in traces:
        assert len(steps(trace)) == 23  # 1437 images, 32 per rank
        assert {bucket.transport for bucket in trace.buckets} == {"shm"}
        assert trace.dropped == trace.never_agreed == 0
        assert any(event["name"] == "CYCLE_START" for event in json.loads(trace.path.read_text()))
    assert make_page(traces).count("data:image/png") == 4
