"""Faults of a training job, each declared as (what, rank, step), and what has to come of them.

A fault happens while the others wait for the rank in that step. Either training goes on, and ends
with the weights of an undisturbed one, or the job ends within twice the limit, says which rank or
host it was and why, and leaves nothing behind. The tests of each framework run all of them, over
shared memory, TCP, and two hosts of two ranks. Needs root for hosts and full disks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import leftovers
import pytest
from live_ranks import Launch
from poor_link import poor_link

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

HERE = Path(__file__).parent
LIMIT = 4  # GLOO_TIMEOUT_SECONDS
BUSY = 8.0  # seconds that a busy machine may add
# After which the launcher gives up a host, and ranks there their launcher.
SILENCE = 30.0
ANY = r".*"


class Fault(NamedTuple):
    """says: how the job tells of its end; None if training goes on. warns: what it says then."""

    what: str
    rank: int
    step: int
    says: str | None
    places: tuple[str, ...] = ("shm", "tcp")
    warns: str = ""


HOSTS = ("hosts",)
FAULTS = [
    Fault("killed", 1, 3, r"rank 1 on localhost was the first to fail, with exit code 137"),
    Fault("killed", 0, 5, r"rank 0 on localhost was the first to fail, with exit code 137"),
    Fault("stopped", 1, 4, rf"rank 1 for {LIMIT} s"),
    Fault("memory", 1, 3, r"rank 1 (on localhost .*exit code 1|called)"),
    Fault("descriptors", 1, 0, r"descriptor|Too many open files"),
    Fault("descriptors", 1, 5, None),
    Fault("launcher killed", 1, 3, ANY),
    Fault("terminal gone", 0, 3, ANY),
    Fault("output full", 1, 3, None, warns=r"cannot write standard output"),
    Fault("output directory full", 1, 3, None, warns=r"cannot write .*std(out|err): No space left"),
    Fault("clock jumps forth", 1, 3, None),
    Fault("clock jumps back", 0, 5, None),
    Fault("timeline's disk full", 0, 3, None, warns=r"\[timeline\] cannot write"),
    Fault(
        "flight recorder's disk full",
        1,
        3,
        r"rank 1 on localhost was the first to fail, with exit code 137",
    ),
    Fault("killed", 3, 3, r"rank 3 on host1 was the first to fail, with exit code 137", HOSTS),
    Fault("stopped", 2, 3, rf"rank 2 for {LIMIT} s", HOSTS),
    Fault("link down", 2, 4, r"rank [23]\b", HOSTS),
    Fault("link slow", 2, 4, None, HOSTS),
    Fault("link late and lossy", 2, 0, None, HOSTS),
    Fault("one direction black-holed", 2, 3, r"rank [23]\b", HOSTS),
    Fault("host gone", 2, 5, r"host1", HOSTS),
    Fault("launcher killed", 1, 3, ANY, HOSTS),
]


class Case(NamedTuple):
    """A fault of a job of this framework, in one of the places of PLACES."""

    framework: str
    fault: Fault
    place: str

    @property
    def name(self) -> str:
        what, rank, step = self.fault[:3]
        return f"{what} ({rank}, {step}), {self.place}"

    @property
    def ranks(self) -> int:
        return 4 if self.place == "hosts" else 2


class Program(NamedTuple):
    """command: of a rank, which notes `ready`, and `waiting` where the fault is to happen.

    is_right: whether the case's ranks have ended as an undisturbed training does.
    """

    command: Callable[[Case, Path], list[str]]
    is_right: Callable[[Launch, Case], bool]


def _python_command(case: Case, directory: Path) -> list[str]:
    what, rank, step = case.fault[:3]
    words = [directory, case.framework, what.replace(" ", "-"), rank, step]
    return [sys.executable, str(HERE / "training_rank.py"), *map(str, words)]


def _python_is_right(launch: Launch, case: Case) -> bool:
    return all(launch.note(rank, "finished")["right"] for rank in range(case.ranks))


PYTHON = Program(_python_command, _python_is_right)


def cases(framework: str, often: Collection[str], at_start: Collection[str] = ()) -> list[Any]:
    """All of a framework, as parameters of a test. often: the names of those that every run of the
    tests has. at_start: what can only happen to it before it joins the world.
    """
    faults = [fault._replace(step=0) if fault.what in at_start else fault for fault in FAULTS]
    found = [Case(framework, fault, place) for fault in faults for place in fault.places]
    assert set(often) <= {case.name for case in found}, "a case of that name"
    return [
        pytest.param(case, id=case.name, marks=() if case.name in often else pytest.mark.full)
        for case in found
    ]


class Job:
    """A job of a case: starts it, lets the fault happen, and looks at the end."""

    def __init__(
        self, case: Case, program: Program, directory: Path, hosts: VirtualHosts | None
    ) -> None:
        self.case = case
        self.program = program
        self.fault = case.fault
        self.hosts = hosts
        self.directory = directory
        fault = case.fault
        environment = {
            "GLOO_TIMEOUT_SECONDS": str(LIMIT),
            "PERSEUS_FLIGHT_RECORDER": str(directory),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        options: list[str] = []
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
        if hosts is not None:
            options = ["-H", "host0:2,host1:2"]
            environment |= {"PATH": hosts.environment()["PATH"], "PYTHONPATH": str(HERE.parents[1])}
            popen = functools.partial(hosts.popen, 0)
        else:
            environment["PERSEUS_TRANSPORT"] = case.place
        limits: list[str] = []
        small = directory / "small"
        if "disk full" in fault.what or fault.what == "output directory full":
            small.mkdir()
            mounted = 'mount -t tmpfs -o size=4k tmpfs "$0" && exec "$@"'
            limits = ["unshare", "--mount", "sh", "-c", mounted, str(small)]
        if fault.what == "timeline's disk full":
            environment["HOROVOD_TIMELINE"] = str(small / "trace.json")
        if fault.what == "flight recorder's disk full":
            environment["PERSEUS_FLIGHT_RECORDER"] = str(small)
        if fault.what == "output directory full":
            options += ["--output-filename", str(small)]
        if fault.what == "output full":
            limits = ["sh", "-c", 'exec "$@" >/dev/full', "sh"]
        if fault.what == "link late and lossy":
            # A packet that opens a connection is sent again after 1, 3 and 7 s.
            environment |= {
                "PERSEUS_GLOO_NETWORK_INTERFACE": "poor0",
                "GLOO_TIMEOUT_SECONDS": str(8 * LIMIT),
            }
        if fault.what.startswith("clock"):
            environment |= {
                "LD_PRELOAD": str(_clock(directory)),
                "FAULTS_CLOCK": str(directory / "clock"),
            }
        self.launch = Launch(
            directory,
            size=case.ranks,
            options=options,
            command=program.command(case, directory),
            limits=limits,
            terminal=fault.what == "terminal gone",
            environment=environment,
            popen=popen,
        )

    @property
    def victims(self) -> list[int]:
        """Ranks that the fault is about, and that need not tell of it."""
        what, rank, *_ = self.fault
        together = what in ("link down", "one direction black-holed", "host gone")
        return [2, 3] if together else [rank]

    def strike(self) -> float:
        """Let it happen once the rank is there; returns the time of it."""
        launch, (what, rank, step, *_) = self.launch, self.fault
        if step == 0:
            launch.note(0 if rank else 1, "ready")
            return time.monotonic()
        launch.note(rank, "waiting")
        for other in range(self.case.ranks):
            assert launch.note(other, "ready")
        launch.remember()
        pid = self._pid(rank)
        at = time.monotonic()
        if what in ("killed", "flight recorder's disk full"):
            os.kill(pid, signal.SIGKILL)
        elif what == "stopped":
            os.kill(pid, signal.SIGSTOP)
        elif what == "memory":
            used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        elif what == "descriptors":
            numbers = {int(entry) for entry in os.listdir(f"/proc/{pid}/fd")}
            free = next(number for number in range(1 << 20) if number not in numbers)
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        elif what == "launcher killed":
            launch.process.kill()
        elif what == "terminal gone":
            launch.hang_up()
        elif what.startswith("clock"):
            seconds = 7200 if what.endswith("forth") else -7200
            (self.directory / "clock").write_text(str(seconds))
        elif what == "link down":
            self._hosts.set_link(1, False)
        elif what == "link slow":
            self._hosts.set_rate("2mbit")
        elif what == "one direction black-holed":
            made = self._hosts.run(1, ["ip", "rule", "add", "to", "10.77.0.1", "blackhole"])
            assert made.returncode == 0, made.stderr
        elif what == "host gone":
            self._hosts.kill(1)
        (self.directory / "struck").touch()
        return at

    def expect_the_end(self, at: float) -> None:
        """That which the fault is declared to have, in time."""
        if self.fault.says is None:
            assert self.launch.finish() == 0, self.said()
            assert self.program.is_right(self.launch, self.case), self.said()
            assert re.search(self.fault.warns, self.launch.output + self.launch.errors), self.said()
            return
        assert self.launch.finish() != 0, self.said()
        limit = 2 * LIMIT if self.hosts is None else SILENCE
        assert time.monotonic() - at < limit + BUSY, self.said()
        text = self.launch.output + self.launch.errors
        assert re.search(self.fault.says, text), self.said()
        for rank in range(self.case.ranks):
            assert self.launch.find(rank, "finished") is None, self.said()
            told = self.launch.find(rank, "error")
            if told is None:
                # What a rank without Python has to say is in the job's output, if the launcher has
                # not ended it before.
                silent = rank in self.victims or self.fault.says == ANY
                assert silent or self.program is not PYTHON, (rank, self.said())
                continue
            assert told["at"] - at < 2 * LIMIT + BUSY, (rank, self.said())
            if rank not in self.victims and self.fault.says != ANY:
                named = "|".join(map(str, self.victims))
                assert re.search(rf"rank ({named})\b", told["text"]), self.said()

    def said(self) -> str:
        notes = "\n".join(f"{rank}: {self.launch.notes(rank)}" for rank in range(self.case.ranks))
        return f"{self.case.name}\n{notes}\n{self.launch.everything_said()}"

    @property
    def _hosts(self) -> VirtualHosts:
        assert self.hosts is not None
        return self.hosts

    def _pid(self, rank: int) -> int:
        """Its number here; on a virtual host, it has another."""
        needle = f"PERSEUS_RANK={rank}".encode()
        for pid in leftovers.processes(self.launch.mark):
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise AssertionError(f"rank {rank} is not there\n{self.said()}")


def _clock(directory: Path) -> Path:
    library = directory / "jumping_clock.so"
    source = str(HERE / "jumping_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


@contextlib.contextmanager
def _hosts_of(case: Case) -> Iterator[VirtualHosts | None]:
    if case.place != "hosts":
        yield None
        return
    if reason := unavailable():
        pytest.skip(reason)
    with VirtualHosts(2, rate="1gbit") as hosts, contextlib.ExitStack() as stack:
        if case.fault.what == "link late and lossy":
            if not os.path.exists("/dev/net/tun"):
                pytest.skip("links that lose packets need tunnels: modprobe tun")
            stack.enter_context(poor_link(hosts, delay=0.1, loss=0.05))
        yield hosts


@functools.cache
def _no_mounts() -> str:
    """Why this process can have no disk of its own; nothing if it can."""
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/mnt"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"full disks need root: {done.stderr.strip()}"


def run(case: Case, directory: Path, program: Program = PYTHON) -> None:
    """The test of a case."""
    full = "disk full" in case.fault.what or case.fault.what == "output directory full"
    if full and (reason := _no_mounts()):
        pytest.skip(reason)
    with _hosts_of(case) as hosts:
        job = Job(case, program, directory, hosts)
        with job.launch:
            job.expect_the_end(job.strike())
