"""perseus-report: what it reads out of traces, and the page it makes of them."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from perseus.report import analysis
from perseus.report.__main__ import main
from perseus.report.trace import Bucket, Trace, read, read_all

ROW = 7


def span(name: str, pid: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": pid, "tid": 0, "ts": begin, "dur": end - begin, "args": args
    }  # fmt: skip


class Writer:
    """A trace of the core's shape, from times in µs."""

    def __init__(self, rank: int, size: int = 2) -> None:
        job = {"start_time_since_epoch_in_micros": 1_000_000_000, "rank": rank, "size": size}
        self.events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank", **job}}
        ]
        self.rows: dict[str, int] = {}
        self.bucket = 0

    def operation(
        self,
        name: str,
        times: tuple[float, float, float, float],
        size: int = 1000,
        kind: str = "ALLREDUCE",
        transport: str = "shm",
    ) -> None:
        """times: submitted, agreed, its bucket's begin and end."""
        submitted, agreed, begin, end = times
        row = self.rows.setdefault(name, ROW + len(self.rows))
        self.events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        facts = {"bucket": self.bucket, "stream": 0, "transport": transport, "bytes": size}
        done = {"process_set": 0, "outcome": "done"}
        self.events += [
            span("bucket", 1, begin, end, kind=kind, ranks=2, **facts),
            span(f"NEGOTIATE_{kind}", row, submitted, agreed),
            span(kind, row, agreed, end, bytes=size, dtype="float32", tensors=1, **done),
            span("QUEUE", row, agreed, begin),
            span(f"SHM_{kind}", row, begin, end, **facts),
        ]
        self.bucket += 1

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.events))
        return path


def two_steps(rank: int, late: float = 0.0) -> Writer:
    """Two gradients a step; the first is on the wire while backward goes on.

    late: µs by which this rank submits after the other one.
    """
    writer = Writer(rank)
    for start in (1000.0, 3000.0):
        writer.operation("a", (start + late, start + 300, start + 310, start + 510))
        writer.operation("b", (start + 400 + late, start + 700, start + 700, start + 900), 4000)
    return writer


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Rank 1 is 200 µs late."""
    return [
        two_steps(0).write(tmp_path / "trace.json"),
        two_steps(1, 200.0).write(tmp_path / "trace.rank1.json"),
    ]


def test_a_trace_is_read_back(pair: list[Path]) -> None:
    trace = read(pair[1])
    assert (trace.rank, trace.size, len(trace.operations), len(trace.buckets)) == (1, 2, 4, 4)
    first = trace.operations[0]
    assert (first.name, first.kind, first.bytes, first.ok) == ("a", "ALLREDUCE", 1000, True)
    assert first.submitted == pytest.approx(1000 + 1200e-6, abs=1e-7)
    assert first.agreed - first.submitted == pytest.approx(100e-6, abs=1e-7)
    assert first.queued == pytest.approx(10e-6, abs=1e-7)
    assert first.moving == pytest.approx(200e-6, abs=1e-7)
    assert [operation.bucket for operation in trace.operations] == [0, 1, 2, 3]


def test_traces_of_one_job_come_by_rank(pair: list[Path], tmp_path: Path) -> None:
    assert [trace.rank for trace in read_all(pair[::-1])] == [0, 1]
    with pytest.raises(ValueError, match="are both traces of rank 0"):
        read_all([pair[0], pair[0]])
    other = Writer(2, 3).write(tmp_path / "other.json")
    with pytest.raises(ValueError, match="of a job with 3 ranks"):
        read_all([pair[0], other])


def test_traces_of_two_jobs_are_refused(pair: list[Path], tmp_path: Path) -> None:
    worlds = [two_steps(0), two_steps(1), two_steps(1)]
    for writer, world in zip(worlds, ("71", "71", "45"), strict=True):
        writer.events[0]["args"]["world"] = world
    first, same, other = (
        writer.write(tmp_path / f"{number}.json") for number, writer in enumerate(worlds)
    )
    assert len(read_all([first, same])) == 2
    with pytest.raises(ValueError, match=r"2\.json and .*0\.json are of different jobs"):
        read_all([first, other])
    assert len(read_all([first, pair[1]])) == 2  # of a version that did not tell


def test_union_and_length() -> None:
    merged = analysis.union([(5, 6), (1, 3), (2, 4), (4, 4.5), (8, 8)])
    assert merged == [(1, 4.5), (5, 6)]
    assert analysis.length(merged, 2, 5.5) == pytest.approx(3.0)


def test_steps_split_what_is_hidden_from_what_is_not(pair: list[Path]) -> None:
    first, second = analysis.steps(read(pair[0]))
    # Backward: 0 … 400. On the wire: 310 … 510, 700 … 900. Over at 900.
    assert first.hidden == pytest.approx(90e-6, abs=1e-7)
    assert first.exposed == pytest.approx(310e-6, abs=1e-7)
    assert first.waiting == pytest.approx(190e-6, abs=1e-7)
    assert second.begin - first.begin == pytest.approx(2000e-6, abs=1e-7)
    assert analysis.hidden_share([first, second]) == pytest.approx(90 / 400, abs=1e-3)


def test_what_happens_once_is_no_gradient(tmp_path: Path) -> None:
    writer = two_steps(0)
    writer.operation("a", (5000.0, 5100.0, 5100.0, 5200.0))
    writer.operation("metric", (3950.0, 4000.0, 4000.0, 4010.0))
    found = analysis.steps(read(writer.write(tmp_path / "t.json")))
    assert len(found) == 3
    assert found[1].end - found[1].begin == pytest.approx(900e-6, abs=1e-7)
    assert analysis.steps(Trace(Path(), 0, 1)) == []


def test_bandwidth_spreads_bytes_over_time() -> None:
    bucket = Bucket("ALLREDUCE", 4000, 2, "tcp", 1.0, 3.0)
    assert analysis.bus_bytes(bucket) == 4000
    assert analysis.bandwidth([bucket], 0.0, 4.0, 4) == pytest.approx([0, 2000, 2000, 0])
    instant = Bucket("BROADCAST", 70, 3, "tcp", 2.5, 2.5)
    assert analysis.bandwidth([instant], 0.0, 4.0, 4) == pytest.approx([0, 0, 70, 0])
    assert analysis.bus_bytes(Bucket("ALLGATHER", 10, 4, "shm", 0, 1)) == 30
    assert analysis.bus_bytes(Bucket("REDUCESCATTER", 12, 4, "shm", 0, 1)) == 9
    assert analysis.bus_bytes(Bucket("ALLREDUCE", 10, 1, "local", 0, 1)) == 0


def test_what_a_rank_only_gave_zeros_to_is_not_its_operation(tmp_path: Path) -> None:
    writer = two_steps(0)
    for place, event in enumerate(writer.events):
        if event["name"] == "NEGOTIATE_ALLREDUCE" and event["ts"] == 3400:
            del writer.events[place]
            writer.events[place]["args"]["joined"] = 1
            break
    trace = read(writer.write(tmp_path / "t.json"))
    assert [operation.name for operation in trace.operations] == ["a", "b", "a"]
    assert len(trace.buckets) == 4


def test_slowest_tensors_are_those_of_all_ranks(pair: list[Path]) -> None:
    first, second = analysis.slowest(read_all(pair), 5)
    assert (first.name, first.count, second.name) == ("a", 4, "b")
    assert first.negotiating == pytest.approx(2 * 300e-6 + 2 * 100e-6, abs=1e-6)
    assert second.negotiating == pytest.approx(2 * 300e-6 + 2 * 100e-6, abs=1e-6)
    assert first.moving == pytest.approx(4 * 200e-6, abs=1e-6)
    assert first.total - second.total == pytest.approx(4 * 10e-6, abs=1e-6)
    assert len(analysis.slowest(read_all(pair), 1)) == 1


def test_the_rank_that_waits_least_was_last(pair: list[Path]) -> None:
    found = analysis.waiting(read_all(pair))
    assert found.operations == 4
    assert found.last == {0: 0, 1: 4}
    assert found.waited[1] == {}
    assert found.waited[0][1] == pytest.approx(4 * 200e-6, abs=1e-6)


def test_ranks_that_come_together_blame_nobody(tmp_path: Path) -> None:
    paths = [two_steps(rank, 20.0 * rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)]
    found = analysis.waiting(read_all(paths))
    assert (found.operations, found.last) == (4, {0: 0, 1: 0})


def test_the_page_holds_everything(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "page.html"
    assert main([*map(str, pair), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    page = output.read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 4
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    assert not re.search(r"https?://|<script|<link", page)
    assert "rank 1 came last to 4" in page
    assert 'class="warning"' not in page


def test_ranks_of_equal_bandwidth_do_not_hide_each_other(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    colors = pytest.importorskip("matplotlib.colors")
    from perseus.report import plots

    paths = []
    for rank in range(3):
        writer = Writer(rank, 3)
        for begin in (100.0, 500.0, 900.0):
            writer.operation("g", (begin, begin + 1, begin + 2, begin + 90), size=1 << 20)
        paths.append(writer.write(tmp_path / f"{rank}.json"))
    picture = image.imread(io.BytesIO(plots.bandwidth_over_time(read_all(paths))))
    shares = [
        float((abs(picture[..., :3] - colors.to_rgb(colour)).max(axis=-1) < 0.01).mean())
        for colour in plots._RANKS[:3]
    ]
    assert min(shares) > 0.01 and max(shares) < 1.1 * min(shares), shares


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Dollars are no mathematics, and letters that cannot be shown are no failure."""
    pytest.importorskip("matplotlib")
    writer = Writer(0, 1)
    for at, name in enumerate(["$^$", "$a$", "a\tb\x7f", "x" * 90]):
        writer.operation(name, (at + 1.0, at + 2.0, at + 3.0, at + 4.0))
    output = tmp_path / "page.html"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([str(writer.write(tmp_path / "t.json")), "-o", str(output)]) == 0
    assert output.exists()


def test_one_trace_is_enough_for_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    writer = Writer(0, 3)
    writer.operation("<b>&", (1.0, 2.0, 3.0, 4.0))
    mark = {"name": "DROPPED_RECORDS", "ph": "i", "pid": 0, "ts": 1, "args": {"count": 5}}
    writer.events.append(mark)
    output = tmp_path / "page.html"
    assert main([str(writer.write(tmp_path / "t.json")), "-o", str(output)]) == 0
    said = capsys.readouterr().err
    assert "Rank 0: 5 records could not be written" in said
    assert "No trace of rank 1, 2" in said
    page = output.read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert page.count('class="warning"') == 2


def test_mistakes_are_one_line(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("[{")
    empty = Writer(0).write(tmp_path / "empty.json")
    for arguments, message in (
        ([], "the following arguments are required: trace.json"),
        ([str(tmp_path / "no.json")], "No such file"),
        ([str(broken)], f"{broken} is not a timeline of Perseus"),
        ([str(empty)], "no operation was recorded"),
        ([str(pair[0]), "-o", str(tmp_path)], "Is a directory"),
    ):
        if message.startswith("no op"):
            pytest.importorskip("matplotlib")
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("perseus-report: error: ") and message in said
        assert len(said.splitlines()) == 1


def test_a_recording_is_not_written_over(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-o trace*.json`, and a link to what is read."""
    pytest.importorskip("matplotlib")
    link = tmp_path / "page.html"
    link.symlink_to(pair[1])
    for output, given in ((pair[0], pair[1]), (link, pair[1])):
        before = output.read_bytes()
        assert main(["-o", str(output), str(given)]) == 2
        assert f"-o {output} is a trace" in capsys.readouterr().err
        assert output.read_bytes() == before
    page = tmp_path / "older page.html"
    for _ in range(2):
        assert main(["-o", str(page), *map(str, pair)]) == 0


def test_times_that_no_recording_has_are_refused_or_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    endless, at_once = Writer(0, 1), Writer(0, 1)
    endless.operation("a", (1.0, 2.0, 3.0, float("9e307")))
    path = endless.write(tmp_path / "endless.json")
    path.write_text(path.read_text().replace("9e+307", "1e400"))
    assert main([str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert f"{path} is not a timeline of Perseus" in capsys.readouterr().err
    at_once.operation("a", (5.0, 5.0, 5.0, 5.0), kind="<i>")
    path = at_once.write(tmp_path / "at_once.json")
    assert main([str(path), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<td>&lt;i&gt;</td>" in page and "<i>" not in page


def test_without_matplotlib_it_says_what_to_install(
    pair: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(pair[0])]) == 2
    assert capsys.readouterr().err == (
        "perseus-report: error: the plots need matplotlib: pip install perseus-training[plots]\n"
    )


def test_it_is_installed_as_a_command() -> None:
    beside = str(Path(sys.executable).parent)
    command = shutil.which("perseus-report", path=f"{beside}:{os.environ['PATH']}")
    assert command is not None
    done = subprocess.run([command, "-h"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "trace.json" in done.stdout
