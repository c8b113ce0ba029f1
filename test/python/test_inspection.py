"""perseusrun --inspect, and what a rank shows for which others wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perseus import _core
from perseus.run.signals import inspect_signal

LAUNCHER = [sys.executable, "-m", "perseus.run"]
# Rank 1 is somewhere else until it finds the file.
SCRIPT = """
import signal, sys, time
from pathlib import Path
import numpy as np
import perseus.arrays as hvd
hvd.init()
hvd.allreduce(np.ones(3, "f4"), "first", hvd.Sum)
if "own handler" in sys.argv:
    signal.signal(43, lambda *_: print("mine", flush=True))
def somewhere_else():
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
print("ready", hvd.rank(), flush=True)
if hvd.rank() == 1:
    somewhere_else()
hvd.allreduce(np.ones(3, "f4"), "second", hvd.Sum)
print("done", hvd.rank(), flush=True)
"""


class Job:
    """A job that hangs until go()."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        self.process = process
        self.output = ""
        self._file = file

    def wait_for(self, text: str, times: int = 1) -> None:
        """Read output until the text has come so often."""
        assert self.process.stdout is not None
        while self.output.count(text) < times:
            line = self.process.stdout.readline()
            assert line, f"no {text!r} in:\n{self.output}"
            self.output += line

    def go(self) -> None:
        self._file.touch()

    def end(self) -> str:
        """Let it end; everything that it has said."""
        self.go()
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        assert self.process.wait(60) == 0, self.output
        return self.output


@contextmanager
def hanging(
    tmp_path: Path, *arguments: str, command: tuple[str, ...] = (), **variables: str
) -> Iterator[Job]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    file = tmp_path / "go"
    ranks = command or (sys.executable, str(script), str(file), *arguments)
    process = subprocess.Popen(
        [*LAUNCHER, "-np", "3", *(part.format(script=script, file=file) for part in ranks)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    with process:
        job = Job(process, file)
        try:
            job.wait_for("ready", 3)
            yield job
        finally:
            if process.poll() is None:
                process.terminate()


def inspect(pid: int, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, "--inspect", str(pid)],
        capture_output=True, text=True, timeout=60, env={**os.environ, **variables},
    )  # fmt: skip


def test_the_signal_is_the_same_everywhere() -> None:
    described = {variable["name"]: variable for variable in _core.config_table()}
    assert int(described["PERSEUS_INSPECT_SIGNAL"]["default"]) == inspect_signal()


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = inspect_signal()
    monkeypatch.setenv("PERSEUS_INSPECT_SIGNAL", "")
    assert inspect_signal() == usual


def test_ranks_say_what_they_wait_for_and_go_on(tmp_path: Path) -> None:
    with hanging(tmp_path) as job:
        time.sleep(0.5)  # so that waiting has lasted for some time
        asked = inspect(job.process.pid)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith(f"asked process {job.process.pid}: in its output, each rank")
        job.wait_for("[inspect]", 3)
        output = job.end()
    for rank in (0, 2):
        assert re.search(
            rf"{rank}]<stderr>:  allreduce.second since [0-9.]+ s: it is not submitted by rank 1",
            output,
        ), output
    assert "rank 1 warning: [inspect] this rank waits for no other one" in output
    assert re.search(r"\[1\]<stderr>:  File .*script.py\", line \d+ in somewhere_else", output), (
        output
    )
    assert output.count("most recent call first") == 3
    assert output.count("done") == 3


def test_a_rank_alone_can_be_asked_and_shells_are_not_ended(tmp_path: Path) -> None:
    command = ("sh", "-c", f"{sys.executable} {{script}} {{file}}; true")
    with hanging(tmp_path, command=command) as job:
        inspect(job.process.pid)
        job.wait_for("[inspect]", 3)
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text()
        agent = children.split()[0]
        shell = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0]
        refused = inspect(int(shell))
        assert refused.returncode == 2
        assert f"--inspect {shell}: this process does not answer signal 43" in refused.stderr
        python = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0]
        assert inspect(int(python)).returncode == 0
        job.wait_for("[inspect]", 4)
        assert job.end().count("done") == 3


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    with hanging(tmp_path, "own handler") as job:
        inspect(job.process.pid)
        job.wait_for("mine", 1)  # of rank 1, the one that gets back into Python at once
        assert "[inspect]" not in job.end()


def test_a_stall_does_not_call_a_handler_of_the_script(tmp_path: Path) -> None:
    with hanging(tmp_path, "own handler", HOROVOD_STALL_CHECK_TIME_SECONDS="1") as job:
        job.wait_for("rank 1 warning: [stall] rank 0 waits until", 2)
        assert "mine" not in job.end()


def test_no_signal_asks(tmp_path: Path) -> None:
    with hanging(tmp_path, PERSEUS_INSPECT_SIGNAL="0") as job:
        refused = inspect(job.process.pid)
        assert refused.returncode == 2
        assert "this process does not answer signal 43" in refused.stderr
        off = inspect(job.process.pid, PERSEUS_INSPECT_SIGNAL="0")
        assert "PERSEUS_INSPECT_SIGNAL=0 has no signal that could ask" in off.stderr
        assert "[inspect]" not in job.end()


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (
            ["--inspect", "999999999"],
            {},
            "--inspect 999999999: there is no process with this number",
        ),
        (
            ["--inspect", "99999999999999"],
            {},
            "--inspect 99999999999999: there is no process with this number",
        ),
        (["--inspect", "0"], {}, "--inspect"),
        (
            ["-np", "1", "true"],
            {"PERSEUS_INSPECT_SIGNAL": "x"},
            "=x: expected 0, 10, 12, or 34 to 64",
        ),
        (["-np", "1", "true"], {"PERSEUS_INSPECT_SIGNAL": "9"}, "=9: expected 0, 10, 12, or"),
        (
            ["-np", "1", "true"],
            {"PERSEUS_INSPECT_SIGNAL": "99"},
            "=99: expected 0, 10, 12, or 34 to 64",
        ),
    ],
)
def test_wrong_numbers_are_one_line(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    result = subprocess.run(
        [*LAUNCHER, *arguments], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert result.returncode == 2
    assert said in result.stderr


def test_who_is_waited_for_shows_its_threads(tmp_path: Path) -> None:
    with hanging(tmp_path, HOROVOD_STALL_CHECK_TIME_SECONDS="1") as job:
        job.wait_for("in somewhere_else")
        job.wait_for("[inspect]")
        output = job.end()
    assert (
        "rank 1 warning: [stall] rank 0 waits until this rank submits [allreduce.second]. "
        "This rank is alive, but does something else." in output
    )
    assert "[0]<stderr>:Current thread" not in output


def test_a_stopped_launcher_passes_the_question_on(tmp_path: Path) -> None:
    with hanging(tmp_path) as job:
        job.process.send_signal(signal.SIGSTOP)
        assert inspect(job.process.pid).returncode == 0
        job.process.send_signal(signal.SIGCONT)
        job.wait_for("[inspect]", 3)
        assert job.end().count("done") == 3


def test_a_process_with_a_world_may_start_a_job_and_still_answers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, perseus\n"
        "import perseus.arrays as hvd\n"
        "hvd.init()\n"
        "assert perseus.run(int, np=1) == [0]\n"
        "os.kill(os.getpid(), 43)\n"
        "time.sleep(1.5)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "[inspect] this rank waits for no other one" in result.stderr
