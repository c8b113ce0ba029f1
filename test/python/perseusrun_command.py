"""Runs perseusrun as users do, in a process of its own, for the tests named test_run_*."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COMMAND = [sys.executable, "-m", "perseus.run"]
PATIENT = [sys.executable, str(Path(__file__).parents[1] / "patient_perseusrun.py")]


def environment(**changes: str) -> dict[str, str]:
    """This process's, with one thread a rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def perseusrun(
    *arguments: str,
    timeout: float = 300,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=env or environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Running:
    """A perseusrun that is still at work; leaves no process behind."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *arguments],
            env=env or environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self, timeout: float = 300) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, output, errors


def eventually(condition: Callable[[], bool], timeout: float = 300) -> bool:
    """Whether `condition` became true in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
