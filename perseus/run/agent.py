"""Runs the ranks of one host for perseusrun: starts them, forwards output, reports and ends them.

perseusrun starts it locally, or sends this very source through ssh to any Python 3.7 or later:
standard library only, nothing of Perseus imported. The main thread does everything but three
things: one thread listens to perseusrun, one watches how long it has been silent, and one waits for
each rank.

Talk: standard input carries one JSON line with the job, then lines END (SIGTERM, and SIGKILL when
the grace is over) or KILL; its end means END. Standard output carries MARK, then frames: FRAME
(kind, rank, size) and content. When a host or a network vanishes, neither side sees an end, so both
send heartbeats, empty lines and ALIVE frames: silence for as long as the argument says means END,
too. A line WAIT suspends the clock until the next line: perseusrun itself is being stopped.

A job with a call (perseus.run() of Python) gives every rank that call on standard input, and takes
what it answers on the descriptor that ANSWER_VARIABLE names.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MARK = b"\0perseusrun agent\0"  # a login shell may print text before it, which is not a frame
FRAME = struct.Struct(">cII")
HELLO, OUT, ERR, ANSWER, EXIT, FAILED, ALIVE = b"h", b"o", b"e", b"a", b"x", b"f", b"l"
ANSWER_VARIABLE = "PERSEUS_ANSWER_FD"
GRACE_SECONDS = 5.0
HEARTBEATS = 6  # in the time after which silence counts as the other side's end
_CHUNK = 65536


def cores() -> int:
    """Processors this process may use, a container's share of them counted."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def _die_with_parent(parent: int) -> None:
    """Between fork and exec: a killed agent takes its ranks along."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


class Rank:
    """One rank: a process that leads a session of its own, and the pipes of what it says."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], answer: BinaryIO | None
    ) -> None:
        self.rank = rank
        self.process = process
        self.exited = False
        self.pipes: list[tuple[bytes, Any]] = [(OUT, process.stdout), (ERR, process.stderr)]
        if answer is not None:
            self.pipes.append((ANSWER, answer))

    def has_leftovers(self) -> bool:
        """Whether its process group has living members beside its (ended) leader."""
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.process.pid:
                try:
                    stat = Path("/proc", entry, "stat").read_bytes()
                except OSError:
                    continue
                fields = stat.rpartition(b")")[2].split()
                if int(fields[2]) == self.process.pid and fields[0] not in (b"Z", b"X"):
                    return True
        return False


class Agent:
    """Owns this host's ranks from start to end. run() belongs to the main thread."""

    def __init__(self, orders: Any, reports: int, silence: float) -> None:
        """silence: seconds after which perseusrun counts as lost; 0 = never."""
        self._orders = orders
        self._reports = reports
        self._silence = silence
        self._grace = GRACE_SECONDS  # until there is a job, which has its own
        self._lost_at = float("inf")  # unless something arrives before
        self._heartbeat_at = 0.0
        self._has_job = False
        self._muted = False
        self._ranks: list[Rank] = []
        # Guards signalling against reaping: a pid must not be reused in between.
        self._lock = threading.Lock()
        self._ending = False
        self._exits: queue.SimpleQueue[tuple[Rank, int]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        hello = {
            "hostname": socket.gethostname(),
            "cores": cores(),
            "ssh_connection": os.environ.get("SSH_CONNECTION", ""),
        }
        self._write(MARK)
        self._report(HELLO, 0, json.dumps(hello).encode())
        lines = self._lines()
        job = self._wait_for_job(lines)
        if job is None:
            return 0
        self._grace = job["grace"]
        started = self._start(job)
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        if self._silence:
            threading.Thread(target=self._watch, daemon=True).start()
        if not started:
            self._kill(signal.SIGKILL)
        for rank in self._ranks:
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()
        self._forward()
        with self._lock:
            self._signal(signal.SIGKILL)
            for rank in self._ranks:
                rank.process.wait()
            self._ranks = []
        return 0

    def _lines(self) -> Iterator[bytes]:
        """What perseusrun sends; each piece of it is a sign of life."""
        rest = bytearray()
        self._on_sign_of_life()
        while True:
            data = self._orders.read1(_CHUNK)
            self._on_sign_of_life()
            if not data:
                return
            rest += data
            if b"\n" in data:
                *lines, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                for line in lines:
                    if line == b"WAIT":
                        self._wait()
                    elif line:
                        yield line

    def _on_sign_of_life(self) -> None:
        if self._silence:
            self._lost_at = time.monotonic() + self._silence
            if not self._has_job:  # no rank to end yet: SIGALRM may simply end this process
                signal.setitimer(signal.ITIMER_REAL, self._silence)

    def _wait(self) -> None:
        self._lost_at = float("inf")
        if not self._has_job:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _wait_for_job(self, lines: Iterator[bytes]) -> dict[str, Any] | None:
        """None: ended before it began."""
        line = next(lines, b"")
        self._has_job = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        return json.loads(line) if line.startswith(b"{") else None

    def _start(self, job: dict[str, Any]) -> bool:
        base = dict(os.environ) if job["keep_environment"] else {}
        base.update(job["environment"])
        for entry in job["ranks"]:
            try:
                self._ranks.append(_start_rank(job, entry, base))
            except (OSError, ValueError) as error:
                self._report(FAILED, entry["rank"], _explain(error, job).encode())
                return False
        return True

    def _listen(self, lines: Iterator[bytes]) -> None:
        for order in lines:
            if order == b"KILL":
                self._kill(signal.SIGKILL)
            elif order == b"END":
                self._end()
        self._end()

    def _watch(self) -> None:
        """Ends everything once perseusrun has been silent for too long."""
        while True:
            left = self._lost_at - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, self._silence))
        self._muted = True
        self._end()
        time.sleep(self._grace + 1.0)
        self._kill(signal.SIGKILL)
        os._exit(1)  # the main thread may be stuck in a report that nobody takes

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self._kill(signal.SIGTERM)
            timer = threading.Timer(self._grace, self._kill, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def _kill(self, number: int) -> None:
        with self._lock:
            self._signal(number)

    def _signal(self, number: int, only: Rank | None = None) -> None:
        for rank in self._ranks:
            if only in (None, rank):
                try:
                    os.killpg(rank.process.pid, number)
                    # A stopped process takes no notice of SIGTERM before it goes on.
                    os.killpg(rank.process.pid, signal.SIGCONT)
                except OSError:
                    pass

    def _wait_for(self, rank: Rank) -> None:
        # Not reaped here: while the leader is a zombie, no other process gets its number.
        result = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        status = 1
        if result is not None:
            ended = result.si_code == os.CLD_EXITED
            status = result.si_status if ended else 128 + result.si_status
        self._exits.put((rank, status))
        os.write(self._waker, b"x")

    def _forward(self) -> None:
        """Until every rank has exited and the last of its processes let go of its pipes."""
        self._selector.register(self._wake, selectors.EVENT_READ)
        for rank in self._ranks:
            for kind, pipe in rank.pipes:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (kind, rank))
        give_up = 0.0
        while True:
            if all(rank.exited for rank in self._ranks):
                now = time.monotonic()
                give_up = give_up or now + self._grace
                if not any(rank.has_leftovers() for rank in self._ranks):
                    give_up = min(give_up, now)
                if now >= give_up:
                    self._kill(signal.SIGKILL)
                    self._drain()
                    return
            if self._silence and time.monotonic() >= self._heartbeat_at:
                self._report(ALIVE, 0, b"")
            for key, _ in self._selector.select(0.05 if give_up else self._until_heartbeat()):
                if key.data is not None:
                    self._pass_on(key.fileobj, *key.data)
                else:
                    os.read(self._wake, 1)
                    self._note_exit(*self._exits.get())

    def _until_heartbeat(self) -> float | None:
        return max(0.0, self._heartbeat_at - time.monotonic()) if self._silence else None

    def _note_exit(self, rank: Rank, status: int) -> None:
        self._drain(rank)
        rank.exited = True
        self._report(EXIT, rank.rank, str(status).encode())
        with self._lock:
            self._signal(signal.SIGTERM, only=rank)  # what it left running

    def _drain(self, only: Rank | None = None) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and only in (None, key.data[1]):
                while self._pass_on(key.fileobj, *key.data):
                    pass

    def _pass_on(self, pipe: Any, kind: bytes, rank: Rank) -> bool:
        if pipe not in self._selector.get_map():  # its end came earlier in the same round
            return False
        try:
            data = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._report(kind, rank.rank, data)
        else:
            self._selector.unregister(pipe)
        return bool(data)

    def _report(self, kind: bytes, rank: int, data: bytes) -> None:
        self._write(FRAME.pack(kind, rank, len(data)) + data)

    def _write(self, data: bytes) -> None:
        self._heartbeat_at = time.monotonic() + self._silence / HEARTBEATS
        view = memoryview(data)
        while view and not self._muted:
            try:
                view = view[os.write(self._reports, view) :]
            except OSError:  # perseusrun is gone; the end of its orders ends the ranks
                self._muted = True


def _start_rank(job: dict[str, Any], entry: dict[str, Any], base: dict[str, str]) -> Rank:
    environment = {**base, **entry["environment"]}
    call = None if job["call"] is None else _file_with(base64.b64decode(job["call"]))
    theirs: list[int] = []
    answer: BinaryIO | None = None
    try:
        if call is not None:
            end, descriptor = os.pipe()
            answer = os.fdopen(end, "rb", buffering=0)
            theirs.append(descriptor)
            environment[ANSWER_VARIABLE] = str(descriptor)
        parent = os.getpid()
        # The first thread has not started yet: forking with preexec_fn is safe.
        process = subprocess.Popen(
            job["command"],
            cwd=job["directory"],
            env=environment,
            stdin=subprocess.DEVNULL if call is None else call,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=theirs,
            preexec_fn=lambda: _die_with_parent(parent),  # noqa: PLW1509
        )
    finally:
        if call is not None:
            call.close()
        for descriptor in theirs:
            os.close(descriptor)
    return Rank(entry["rank"], process, answer)


def _file_with(data: bytes) -> Any:
    """A nameless file: a pipe would have to be filled while its reader is still starting."""
    # In memory since Python 3.8, so that a full disk does not prevent the start.
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("call"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - Popen's, who takes it over
    file.write(data)
    file.seek(0)
    return file


def _explain(error: Exception, job: dict[str, Any]) -> str:
    """'CODE text', the code as a shell would give it."""
    command = str(job["command"][0])
    if isinstance(error, OSError) and error.filename == job["directory"]:
        return "1 cannot change to directory " + str(job["directory"]) + ": " + str(error.strerror)
    if isinstance(error, FileNotFoundError) and error.filename == command:
        return "127 " + command + ": command not found"
    if isinstance(error, OSError):
        return "126 " + command + ": " + str(error.strerror)
    return "1 " + command + ": " + str(error)


def main() -> int:
    try:
        return Agent(sys.stdin.buffer, 1, float(sys.argv[1])).run()
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    # Not sys.exit: the interpreter's end would trip over the thread that still reads standard
    # input.
    os._exit(main())
