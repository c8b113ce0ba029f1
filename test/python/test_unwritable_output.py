"""Commands whose output a full disk does not take, or which nobody reads any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PERSEUSRUN, REPORT = ("-m", "perseus.run"), ("-m", "perseus.report")
FULL = "No space left on device"
# A suite whose jobs are two records. Between them it waits for a line.
BENCH = """
import sys
from perseus.bench import __main__ as command_line
from perseus.bench.record import Record

def run(job, log, show):
    for peer in ("perseus", "memcpy"):
        times = {"median_s": 2e-6, "min_s": 1e-6, "n": 5, "vs_perseus": 1.0}
        record = Record("memory", peer, "allreduce", 2, 1, 4096, verified=True, **times)
        show(record.to_json() + "\\n")
        sys.stdin.readline()
    log("of a rank")

command_line.run = run
command_line.suite = lambda: [command_line.Job(command_line.Plan(["memory"]))]
sys.exit(command_line.main(sys.argv[1:]))
"""
PAGE = "<!-- bench:begin -->\nold\n<!-- bench:end -->\n"


@contextmanager
def started(*arguments: str, **streams: int) -> Iterator[subprocess.Popen[str]]:
    """A Python command; its streams are pipes, but for the given ones."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | streams
    with subprocess.Popen([sys.executable, *arguments], **pipes, text=True) as process:
        yield process


def with_closed_output(*arguments: str) -> tuple[int, str]:
    """The exit status of a command whose output nobody reads, and what it says of that."""
    reader, writer = os.pipe()
    os.close(reader)
    with started(*arguments, stdout=writer) as process:
        os.close(writer)
        _, error = process.communicate(timeout=120)
        return process.returncode, error


def with_full_disk(*arguments: str, stream: str = "stdout") -> tuple[int, str]:
    """The same of a command whose stdout or stderr is on a full disk; what the other one says."""
    with open("/dev/full", "w") as full, started(*arguments, **{stream: full.fileno()}) as process:
        output, error = process.communicate(timeout=120)
        return process.returncode, (output or "") + (error or "")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    pytest.importorskip("matplotlib")
    job = {"start_time_since_epoch_in_micros": 10, "rank": 0, "size": 1}
    done = {"bytes": 4, "dtype": "float32", "tensors": 1, "process_set": 0, "outcome": "done"}
    agreed = {"name": "NEGOTIATE_ALLREDUCE", "ph": "X", "pid": 7, "tid": 0, "args": {}}
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank", **job}},
        {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "a"}},
        {**agreed, "ts": 0, "dur": 1},
        {"name": "ALLREDUCE", "ph": "X", "pid": 7, "tid": 0, "ts": 1, "dur": 2, "args": done},
    ]
    (tmp_path / "trace.json").write_text(json.dumps(events))
    return str(tmp_path / "trace.json")


@pytest.mark.parametrize("flag", ["--help", "--version", "--check-build"])
def test_what_perseusrun_says_itself(flag: str) -> None:
    assert with_closed_output(*PERSEUSRUN, flag) == (128 + signal.SIGPIPE, "")
    line = f"perseusrun: error: standard output: {FULL}\n"
    assert with_full_disk(*PERSEUSRUN, flag) == (1, line)


@pytest.mark.parametrize("command", ["perseus.run", "perseus.report", "perseus.bench"])
def test_an_error_that_cannot_be_said_keeps_its_status(command: str) -> None:
    assert with_full_disk("-m", command, "--no-such-flag", stream="stderr") == (2, "")


def test_a_report_is_written_though_nobody_reads_where_it_is(trace: str, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    command = [*REPORT, trace, "-o", str(output)]
    assert with_closed_output(*command) == (128 + signal.SIGPIPE, "")
    assert output.read_text().startswith("<!doctype html>")
    output.unlink()
    line = f"perseus-report: error: standard output: {FULL}\n"
    assert with_full_disk(*command) == (1, line)
    assert output.exists()


def test_a_reader_that_leaves_a_bench_ends_it_with_what_was_measured(tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    with started("-c", BENCH, "--json", str(saved)) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("memory"):
            pass
        process.stdout.close()
        process.stdout = None
        _, error = process.communicate("go on\n" * 2, timeout=120)
    assert (process.returncode, error) == (128 + signal.SIGPIPE, "")
    peers = [json.loads(line)["peer"] for line in saved.read_text().splitlines()]
    assert peers == ["perseus", "memcpy"]


def test_a_bench_whose_output_is_lost_writes_its_files(tmp_path: Path) -> None:
    for name in ("readme", "bars"):
        (tmp_path / name).write_text(PAGE)
    files = {name: tmp_path / name for name in ("json", "readme", "bars")}
    arguments = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    status, error = with_full_disk("-c", BENCH, *arguments)
    assert status == 1
    assert error == f"perseus-bench: error: standard output: {FULL}\nof a rank\n"
    assert len(files["json"].read_text().splitlines()) == 2
    assert "old" not in files["readme"].read_text() + files["bars"].read_text()


def test_a_bench_whose_log_is_lost_goes_on(tmp_path: Path) -> None:
    status, output = with_full_disk("-c", BENCH, stream="stderr")
    assert status == 0
    assert "memcpy" in output


def test_a_file_of_a_bench_that_is_lost_leaves_the_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme, bars, plot = tmp_path / "readme", tmp_path / "bars", tmp_path / "r.png"
    for page in (readme, bars):
        page.write_text(PAGE)
    plot.symlink_to("/dev/full")
    arguments = ["--json", "/dev/full", "--plot", str(plot)]
    arguments += ["--readme", str(readme), "--bars", str(bars)]
    with started("-c", BENCH, *arguments) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("memory"):
            pass
        readme.unlink()
        output, error = process.communicate("go on\n" * 2, timeout=120)
    assert process.returncode == 1
    assert error.splitlines() == [
        f"perseus-bench: error: --json /dev/full: {FULL}",
        "of a rank",
        f"perseus-bench: error: --plot {plot}: {FULL}",
        f"perseus-bench: error: --readme {readme}: no such file",
    ]
    assert "memcpy" in output
    assert "old" not in bars.read_text()
