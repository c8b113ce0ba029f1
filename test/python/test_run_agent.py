"""The agent of a host, alone: its signs of life, its commands, and what it knows of processes."""

from __future__ import annotations

import errno
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, cast

import pytest
from perseusrun_command import alive, eventually

from perseus.run import agent, host_start
from perseus.run.job import Job
from perseus.run.link import HostLink, local_command, ssh_command
from perseus.run.reports import Failure, Reports

# Says that it runs, and repeats every line that it hears.
_ECHO = """
import os, signal, socket, sys
if sys.argv[1:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:] == ["parent"] and os.fork() == 0:
    os.setsid()  # the child is the one that answers, in a session of its own
elif sys.argv[1:] == ["parent"]:
    signal.pause()
control = socket.socket(fileno=int(os.environ["PERSEUS_CONTROL_FD"]))
control.sendall(b"%d\\n" % os.getpid())
for line in control.makefile("rb"):
    control.sendall(b"heard " + line)
"""


class Processes:
    """Processes 3, 4 and 5 of an elastic job, run by an agent of this host."""

    def __init__(self, *arguments: str, grace: float = 100.0) -> None:
        self.numbers = [3, 4, 5]
        self.host = HostLink("localhost", self.numbers, True, local_command())
        self.heard = dict.fromkeys(self.numbers, b"")
        self.exits: dict[int, int] = {}
        job = Job([sys.executable, "-S", "-E", "-c", _ECHO, *arguments], [], grace=grace)
        ranks: list[tuple[int, dict[str, str]]] = [(number, {}) for number in self.numbers]
        self.host.send(host_start.start_message(job, self.host, ranks, {}, None, control=True))

    def __enter__(self) -> Processes:
        assert self.until(lambda: all(text.endswith(b"\n") for text in self.heard.values()))
        self.pids = {number: int(text) for number, text in self.heard.items()}
        self.heard = dict.fromkeys(self.numbers, b"")
        return self

    def __exit__(self, *_: object) -> None:
        self.host.order_to_kill()
        self.host.wait_or_kill(time.monotonic() + 2.0)
        self.host.kill()
        self.host.process.wait()
        self.host.close()

    def until(self, condition: Callable[[], bool], timeout: float = 30) -> bool:
        """Take frames until `condition` is true; returns whether it became so in time."""
        deadline = time.monotonic() + timeout
        output = self.host.process.stdout
        assert output is not None
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return False
            if not (data := os.read(output.fileno(), 1 << 16)):
                return condition()
            for kind, number, value in self.host.reports.read(data):
                if kind == agent.CONTROL:
                    self.heard[number] += value
                elif kind == agent.EXIT:
                    self.exits[number] = value
        return True

    def answers(self, *numbers: int) -> bool:
        """Whether exactly these processes still answer, and have heard nothing else so far."""
        for number in self.numbers:
            self.host.send(b"TELL %d hello %d\n" % (number, number))
        expected = {
            number: b"heard hello %d\n" % number if number in numbers else b""
            for number in self.numbers
        }
        return self.until(lambda: self.heard == expected)


def test_line_reaches_only_the_process_that_it_is_for() -> None:
    with Processes() as processes:
        processes.host.send(b'TELL 4 {"place": 1, "with": "blanks  "}\nTELL 5  x \n')
        expected = {3: b"", 4: b'heard {"place": 1, "with": "blanks  "}\n', 5: b"heard  x \n"}
        assert processes.until(lambda: processes.heard == expected), processes.heard
        processes.heard = dict.fromkeys(processes.numbers, b"")
        assert processes.answers(3, 4, 5), processes.heard
        assert not processes.exits


def test_ending_one_process_leaves_the_others_alone() -> None:
    with Processes() as processes:
        processes.host.send(b"END 4\n")
        assert processes.until(lambda: bool(processes.exits))
        assert processes.answers(3, 5), processes.heard
        assert processes.exits == {4: 128 + signal.SIGTERM}


def test_one_process_that_ignores_its_end_is_killed_alone_after_the_grace() -> None:
    with Processes("stubborn", grace=0.2) as processes:
        processes.host.send(b"END 4\n")
        assert processes.until(lambda: bool(processes.exits))
        assert processes.answers(3, 5), processes.heard
        assert processes.exits == {4: 128 + signal.SIGKILL}


@pytest.mark.parametrize(("command", "number"), [("END", signal.SIGTERM), ("KILL", signal.SIGKILL)])
def test_child_that_has_left_the_session_ends_with_its_process_alone(
    command: str, number: int
) -> None:
    with Processes("parent") as processes:
        processes.host.send(f"{command} 4\n".encode())
        assert processes.until(lambda: bool(processes.exits))
        assert eventually(lambda: not alive(processes.pids[4]), 30)
        assert processes.answers(3, 5), processes.heard
        assert processes.exits == {4: 128 + number}


@pytest.mark.parametrize(("command", "number"), [("END", signal.SIGTERM), ("KILL", signal.SIGKILL)])
def test_stopped_process_ends_at_once_and_alone(command: str, number: int) -> None:
    with Processes() as processes:
        pid = processes.pids[5]
        os.kill(pid, signal.SIGSTOP)
        stat = Path(f"/proc/{pid}/stat")
        assert eventually(lambda: ") T " in stat.read_text(), 10)
        processes.host.send(f"{command} 5\n".encode())
        assert processes.until(lambda: bool(processes.exits))
        assert processes.answers(3, 4), processes.heard
        assert processes.exits == {5: 128 + number}


def test_commands_for_an_unknown_process_are_ignored() -> None:
    with Processes() as processes:
        processes.host.send(b"TELL 9 x\nEND 9\nKILL 9\nEND x\nKILL 35\nTELL 34 x\nTELL\n")
        assert processes.answers(3, 4, 5), processes.heard
        assert not processes.exits
        processes.host.send(b"KILL\n")
        assert processes.until(lambda: len(processes.exits) == 3)
        assert set(processes.exits.values()) == {128 + signal.SIGKILL}


def test_state_is_that_of_all_processes_of_a_session() -> None:
    """The process that perseusrun has started may be a shell that waits for the script."""
    script = "while :; do [ -e $0 ] || sleep 0.02; done"
    shell = subprocess.Popen(
        ["sh", "-c", f"sh -c '{script}' {__file__} & wait"], start_new_session=True
    )
    rank = agent.Rank(0, cast(Any, shell), None, None)

    def ticks() -> int:
        return int(rank.state().split()[1])

    try:
        assert eventually(lambda: len(list(rank.running())) == 2, 10)
        worker = next(pid for pid in rank.running() if pid != shell.pid)
        before = ticks()
        assert eventually(lambda: ticks() > before + 5, 20)
        assert rank.state().startswith(b"S ")
        os.kill(worker, signal.SIGSTOP)
        assert eventually(lambda: rank.state().startswith(b"T "), 10)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_ranks_that_end_together_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all processes of a host takes long where there are many."""
    looks: list[None] = []

    class Counted(agent.Snapshot):
        def __init__(self) -> None:
            looks.append(None)
            super().__init__()

    monkeypatch.setattr(agent, "Snapshot", Counted)
    reading, writing = os.pipe()
    made = agent.Agent(None, writing, 0.0)
    commands = ["exit 0"] * 7 + ["sleep 600 & exit 3"]
    processes = [subprocess.Popen(["sh", "-c", each], start_new_session=True) for each in commands]
    for number, process in enumerate(processes):
        rank = agent.Rank(number, cast(Any, process), None, None)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        made._ranks.append(rank)
        made._exits.put((rank, 3 if number == 7 else 0))
    (left,) = Counted().session(processes[7].pid)
    looks.clear()
    for _ in range(2):
        made._note_exits()
        made._end_closed()
    assert len(looks) == 1
    assert eventually(lambda: not alive(left), 10)
    told = [agent.FRAME.pack(agent.EXIT, number, 1) + b"0" for number in range(7)]
    assert os.read(reading, 65536) == agent.FRAME.pack(agent.EXIT, 7, 1) + b"3" + b"".join(told)
    for process in processes:
        process.wait()
    for descriptor in (reading, writing, made._wake, made._waker):
        os.close(descriptor)
    made._selector.close()


def test_agent_that_hears_nothing_before_it_has_a_job_ends() -> None:
    command = [sys.executable, "-I", "-S", agent.__file__, "1"]
    for sign_of_life, status in ((b"", -signal.SIGALRM), (b"\n", 0)):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        until = time.monotonic() + 2  # twice as long as it waits for a sign of life
        while sign_of_life and time.monotonic() < until:
            process.stdin.write(sign_of_life)
            process.stdin.flush()
            time.sleep(0.1)
        if sign_of_life:
            assert process.poll() is None
            process.stdin.write(b"END\n")
            process.stdin.close()
        assert process.wait(300) == status
        process.stdin.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_agent_that_has_no_job_yet_ends_on_a_signal(number: int) -> None:
    command = [sys.executable, "-I", "-S", agent.__file__, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(len(agent.MARK))
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_agent_sends_heartbeats_while_it_starts_many_ranks() -> None:
    slow = (
        "import os, time; from perseus.run import agent; start = agent._start_rank; "
        "agent._start_rank = lambda *given: (time.sleep(0.6), start(*given))[1]; "
        "os._exit(agent.main())"
    )
    ranks = [{"rank": rank, "environment": {}} for rank in range(3)]
    job = {"command": ["true"], "directory": "/", "call": None, "grace": 5.0, "control": None}
    job |= {"keep_environment": True, "environment": {}, "ranks": ranks}
    command = [sys.executable, "-c", slow, "3"]  # 0.5 s between heartbeats
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        kinds = [report.kind for report in Reports(range(3)).read(process.stdout.read())]
    assert kinds[: kinds.index(agent.EXIT)].count(agent.ALIVE) >= 3


def test_files_in_the_directory_where_an_agent_starts_are_no_modules(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the user')")
    shell = shlex.split(ssh_command("host", 5)[-1])[-1]
    source = Path(agent.__file__).read_bytes()
    started = subprocess.run(
        ["sh", "-c", shell], cwd=tmp_path, input=b"%d\n" % len(source) + source,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (started.returncode, started.stderr) == (0, b"")
    assert started.stdout.startswith(agent.MARK)


# Runs a module of perseus.run as a program that cannot start any thread.
_WITHOUT_THREADS = """
import importlib, os, sys, threading

def fail(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = fail
os._exit(importlib.import_module("perseus.run." + sys.argv.pop(1)).main())
"""


def test_an_agent_that_cannot_start_threads_says_so_and_ends_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_THREADS, "agent", "0"]
    host = HostLink("localhost", [3, 4], True, command)
    job = Job(["sh", "-c", f"sleep 2; touch {tmp_path}/lives"], [])
    host.send(host_start.start_message(job, host, [(3, {}), (4, {})], {}, None))
    output, errors = host.process.communicate(timeout=60)
    (failure,) = [found for found in host.reports.read(output) if found[0] == agent.FAILED]
    assert failure == (
        agent.FAILED,
        3,
        Failure(
            1,
            "can't start new thread to watch the ranks: raise the limit on processes (ulimit -u), "
            "or the container's pids limit",
        ),
    )
    assert (host.process.returncode, errors) == (1, b"")
    time.sleep(2.5)
    assert not (tmp_path / "lives").exists()


def test_a_launcher_that_cannot_start_threads_says_so_in_one_line() -> None:
    command = [sys.executable, "-c", _WITHOUT_THREADS, "cli", "-np", "2", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "perseusrun: error: can't start new thread: raise the limit on processes (ulimit -u), or "
        "the container's pids limit\n"
    )


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EAGAIN, ": raise the limit on processes (ulimit -u), or the container's pids limit"),
        (errno.EMFILE, f": raise the limit (ulimit -n) of {getrlimit(RLIMIT_NOFILE)[1]}"),
        (errno.EACCES, ""),
    ],
)
def test_a_rank_that_cannot_start_at_a_limit_is_reported_with_the_remedy(
    number: int, remedy: str
) -> None:
    job = {"command": ["python"], "directory": "/"}
    error = OSError(number, os.strerror(number))
    assert agent._explain(error, job) == f"126 python: {os.strerror(number)}{remedy}"
