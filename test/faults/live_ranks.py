"""Starts ranks of rank_program.py, does things to them, and sees to it that nothing is left behind.

Ranks starts them itself, as a launcher that does not interfere when one dies; Launch runs
perseusrun. Every wait has a deadline. One thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import leftovers
import pytest

HERE = Path(__file__).parent
PROGRAM = str(HERE / "rank_program.py")
PERSEUSRUN = [sys.executable, "-m", "perseus.run"]
PATIENT_PERSEUSRUN = [sys.executable, str(HERE.parent / "patient_perseusrun.py")]
SECRET = "0123456789abcdef" * 2
# Seconds, more than a busy machine makes of "at once". Whether it was a clock that ended something,
# errors say themselves.
PATIENCE = 90.0
# Limits that nothing reaches while a test has patience: for what must not wait for them.
NO_CLOCKS = {"GLOO_TIMEOUT_SECONDS": "600", "HOROVOD_START_TIMEOUT": "600"}
_OUR_PREFIXES = ("PERSEUS_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "GLOO_", "TIACC_")
_OUR_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment() -> dict[str, str]:
    """This process's, without what an outer job or the user has set for Perseus."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OUR_PREFIXES) and name not in _OUR_NAMES
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Marked:
    """Processes that carry a mark, and what they held: checked and killed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.held: set[leftovers.Inode] = set()
        self._files = leftovers.shared_memory_files()

    def remember(self) -> None:
        """Look at what the processes hold now."""
        self.held |= leftovers.holdings(leftovers.processes(self.mark))

    def notes(self, rank: int) -> list[dict[str, Any]]:
        try:
            text = Path(self.directory, f"{rank}.notes").read_text(encoding="utf-8")
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def find(self, rank: int, event: str) -> dict[str, Any] | None:
        return next((note for note in self.notes(rank) if note["event"] == event), None)

    def note(self, rank: int, event: str) -> dict[str, Any]:
        """The rank's first note of this event; fails when it does not come in time."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.find(rank, event)) is None:
            ended = self.has_ended(rank)
            if time.monotonic() > deadline or (ended and self.find(rank, event) is None):
                pytest.fail(
                    f"rank {rank} did not note {event!r} within {PATIENCE} s: {self.notes(rank)}\n"
                    f"{self.everything_said()}",
                    pytrace=False,
                )
            time.sleep(0.01)
        return found

    def wait_until_asleep(self, *ranks: int) -> None:
        """Until these ranks sleep where they wait for others, after what they noted last.

        The system's word for it, at several looks in a row: on the way there a rank may sleep for a
        moment.
        """
        pids = [self.note(rank, "ready")["pid"] for rank in ranks]
        deadline = time.monotonic() + PATIENCE
        looks = 0
        while looks < 5:
            assert time.monotonic() < deadline, f"{ranks} do not sleep: {self.notes(ranks[0])}"
            looks = looks + 1 if all(map(leftovers.sleeps, pids)) else 0
            time.sleep(0.01)

    def expect_nothing_left(self) -> None:
        leftovers.expect_nothing_left(self.mark, self.held, self._files)

    def has_ended(self, rank: int) -> bool:
        raise NotImplementedError

    def everything_said(self) -> str:
        raise NotImplementedError


class Ranks(Marked):
    """Ranks of one scenario, started one by one; a context manager."""

    def __init__(
        self,
        directory: Path,
        scenario: Sequence[str],
        size: int,
        *,
        start: bool = True,
        **environment: str,
    ) -> None:
        super().__init__(directory)
        from perseus._core import StoreServer

        self.size = size
        self.server = StoreServer("127.0.0.1", 0, False, SECRET.encode())
        self.rank: dict[int, subprocess.Popen[bytes]] = {}
        self._scenario = list(scenario)
        self._environment = environment
        if start:
            for rank in range(size):
                self.start(rank)

    def start(self, rank: int, limits: Sequence[str] = (), **environment: str) -> None:
        name, *words = self._scenario
        with Path(self.directory, f"{rank}.output").open("wb") as output:
            self.rank[rank] = subprocess.Popen(
                [*limits, sys.executable, PROGRAM, name, str(self.directory), *words],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean_environment() | self._identity(rank) | self._environment | environment,
            )

    def start_together(self, *numbers: int) -> None:
        """Start ranks that join at the same time, however long each takes to be up."""
        hold = Path(self.directory, "hold")
        hold.touch()
        for rank in numbers:
            self.start(rank)
        for rank in numbers:
            self.note(rank, "ready")
        hold.unlink()

    def _identity(self, rank: int) -> dict[str, str]:
        return {
            leftovers.MARK: self.mark,
            "PERSEUS_RANK": str(rank),
            "PERSEUS_SIZE": str(self.size),
            "PERSEUS_RENDEZVOUS_ADDR": "127.0.0.1",
            "PERSEUS_RENDEZVOUS_PORT": str(self.server.port),
            "PERSEUS_SECRET": SECRET,
        }

    def all_note(self, event: str) -> None:
        for rank in self.rank:
            self.note(rank, event)

    def wait_for_steps(self, more: int) -> None:
        """Until every rank has done so many steps more (scenario keep_going)."""
        files = [Path(self.directory, f"{rank}.steps") for rank in self.rank]
        enough = [file.stat().st_size + more for file in files]
        deadline = time.monotonic() + PATIENCE
        while any(file.stat().st_size < size for file, size in zip(files, enough, strict=True)):
            assert time.monotonic() < deadline, self.everything_said()
            time.sleep(0.01)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal; returns the time of it."""
        self.remember()
        at = time.monotonic()
        self.rank[rank].send_signal(number)
        return at

    def signal_all(self, number: int) -> None:
        """Send it to all that live, as a terminal does."""
        self.remember()
        for process in self.rank.values():
            process.send_signal(number)

    def finish(self, rank: int) -> int:
        """The exit status, which must come in time."""
        try:
            return self.rank[rank].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"rank {rank} did not end within {PATIENCE} s: {self.notes(rank)}\n"
                f"{self.everything_said()}",
                pytrace=False,
            )

    def output(self, rank: int) -> str:
        return Path(self.directory, f"{rank}.output").read_text(errors="replace")

    def has_ended(self, rank: int) -> bool:
        return self.rank[rank].poll() is not None

    def everything_said(self) -> str:
        return "\n".join(f"rank {rank} said: {self.output(rank)}" for rank in self.rank)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.remember()
        self.server.close()
        ended_in_time = kind is not None or all(p.poll() is not None for p in self.rank.values())
        for process in self.rank.values():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait(PATIENCE)
        assert ended_in_time, "a rank still ran at the end of its test\n" + self.everything_said()
        if kind is None:
            self.expect_nothing_left()


class Launch(Marked):
    """perseusrun with ranks of a scenario, or of any command; a context manager."""

    def __init__(
        self,
        directory: Path,
        scenario: Sequence[str] = (),
        size: int = 2,
        *,
        options: Sequence[str] = (),
        command: Sequence[str] = (),
        perseusrun: Sequence[str] = PERSEUSRUN,
        limits: Sequence[str] = (),
        terminal: bool = False,
        environment: Mapping[str, str] | None = None,
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        super().__init__(directory)
        if not command:
            name, *words = scenario
            command = [sys.executable, PROGRAM, name, str(directory), *words]
        launcher = [*perseusrun, "-np", str(size), *options]
        self._output = Path(directory, "launch.output")
        self._errors = Path(directory, "launch.errors")
        self._terminal: int | None = None
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": errors,
            }
            if terminal:
                self._terminal, end = pty.openpty()
                streams = dict.fromkeys(streams, end)
                streams["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            self.process = popen(
                [*limits, *launcher, *command],
                env=clean_environment() | {leftovers.MARK: self.mark} | dict(environment or {}),
                cwd=directory,
                start_new_session=True,
                **streams,
            )
            if terminal:
                os.close(end)

    def type(self, keys: bytes) -> None:
        """Press keys on the terminal."""
        assert self._terminal is not None
        self.remember()
        os.write(self._terminal, keys)

    def hang_up(self) -> None:
        """Close the terminal."""
        assert self._terminal is not None
        self.remember()
        os.close(self._terminal)
        self._terminal = None

    def signal(self, number: int) -> None:
        """Send a signal to perseusrun alone."""
        self.remember()
        self.process.send_signal(number)

    def finish(self) -> int:
        """The exit status, which must come in time; nothing may be left behind then."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"perseusrun did not end within {PATIENCE} s\n{self.everything_said()}",
                pytrace=False,
            )
        self.expect_nothing_left()
        return status

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") + self._screen()

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def _screen(self) -> str:
        """What stands on the terminal; asked once, after the end."""
        text = b""
        while self._terminal is not None:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the other end is closed
                data = b""
            if not data:
                break
            text += data
        return text.decode(errors="replace")

    def has_ended(self, rank: int) -> bool:
        return self.process.poll() is not None

    def everything_said(self) -> str:
        return f"perseusrun said: {self._output.read_text()}{self.errors}"

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for pid in leftovers.processes(self.mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE)
        if self._terminal is not None:
            os.close(self._terminal)
