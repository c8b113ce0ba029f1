"""Runs the ranks of one host for perseusrun: starts them, forwards their output and ends them.

perseusrun starts the agent as a child, or sends this source file through ssh to any Python 3.7 or
later. It therefore imports the standard library only, and nothing of Perseus. The main thread does
all the work, except that one thread reads commands of perseusrun, one checks how long perseusrun
has been silent, one ends the ranks after a signal, and one waits for each rank.

Protocol: standard input carries one line of JSON with the job, followed by lines END (send SIGTERM
to all ranks, and SIGKILL after the grace period) or KILL. Both may name one rank: END 3. End of
file means END, and so do SIGTERM, SIGINT and SIGHUP. Standard output carries MARK and then frames,
each a FRAME header (kind, rank, size) and its content. The answer to a line STATE 3 is a STATE
frame with the state of that rank's process in /proc and the clock ticks that it has used. A line
INSPECT 43 sends signal 43 to those processes of the ranks that handle it, which so say what they
wait for.

If a host or a network fails, neither side sees an end of file, so both sides send heartbeats:
perseusrun sends empty lines, the agent sends ALIVE frames. If nothing arrives for as long as the
program's argument says, in seconds, that means END as well; 0 disables the check. A line WAIT
suspends it until the next line, because perseusrun itself is being stopped.

In a job with a call (of perseus.run() in Python), every rank gets that call on standard input and
writes its result to the descriptor that ANSWER_VARIABLE names.

If the job has the name of a variable as "control", every rank gets a socket whose descriptor that
variable names. A line TELL 3 TEXT writes TEXT to rank 3, and what a rank writes comes in CONTROL
frames.

The agent adopts processes of the ranks whose parents have ended, so that it can end those that have
left the session of their rank, too.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import queue
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MARK = b"\0perseusrun agent\0"  # precedes the frames, because a login shell may print text first
FRAME = struct.Struct(">cII")
HELLO, OUT, ERR, ANSWER, EXIT, FAILED, ALIVE = b"h", b"o", b"e", b"a", b"x", b"f", b"l"
CONTROL, STATE = b"c", b"s"
ANSWER_VARIABLE = "PERSEUS_ANSWER_FD"
GRACE_SECONDS = 5.0
HEARTBEATS = 6  # sent in the time after which a silent peer counts as lost
CLOSE_SECONDS = 1.0  # that processes get after their rank's end to write their last output
DESCRIPTORS = 65536  # that an agent and perseusrun may have open, if the hard limit allows it
NO_THREAD = "can't start new thread"  # what Python's error says
MORE_PROCESSES = "raise the limit on processes (ulimit -u), or the container's pids limit"
_CHUNK = 65536
_BEGINNING = 256  # bytes of a program, which tell whether it is a binary
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def cores() -> int:
    """Return how many processors this process may use, within its container's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def raise_descriptor_limit() -> int:
    """Let this process open as many files as a large job needs; return how many it could before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def cause(error: OSError) -> str:
    """Return what has happened, with the remedy if a limit is reached."""
    remedy = ""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        remedy = ": raise the limit (ulimit -n) of " + str(limit)
    elif error.errno == errno.EAGAIN:
        remedy = ": " + MORE_PROCESSES
    return str(error.strerror) + remedy


def _become_rank(parent: int, descriptors: int) -> None:
    """Take back what is the agent's only, and have the kernel kill this process when the agent
    dies. Runs between fork and exec."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    if _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) and os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> bool:
    """Return whether that could be set for this process."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()


def _runs(fields: list[bytes]) -> bool:
    return fields[0] not in (b"Z", b"X")


class Snapshot:
    """The processes of this host at one moment: their parents, their sessions, when they began."""

    def __init__(self) -> None:
        self._stats: dict[int, list[bytes]] = {}
        self._children: dict[int, list[int]] = {}
        for pid in _pids():
            try:
                fields = _stat(pid)
            except OSError:
                continue
            self._stats[pid] = fields
            self._children.setdefault(int(fields[1]), []).append(pid)

    def session(self, leader: int) -> set[int]:
        """Return the processes of a session that run."""
        return {
            pid for pid, fields in self._stats.items() if int(fields[3]) == leader and _runs(fields)
        }

    def below(self, roots: Iterable[int]) -> set[int]:
        """Return the descendants of processes that run."""
        found: set[int] = set()
        left = list(roots)
        while left:
            children = [pid for pid in self._children.get(left.pop(), ()) if pid not in found]
            found.update(children)
            left += children
        return {pid for pid in found if _runs(self._stats[pid])}

    def zombies(self, parent: int) -> set[int]:
        """Return the children of a process that have ended."""
        return {pid for pid in self._children.get(parent, ()) if not _runs(self._stats[pid])}

    def began(self, pid: int) -> bytes:
        """Return when a process began, which tells it from later ones of that number; b"" = it has
        ended."""
        fields = self._stats.get(pid)
        return fields[19] if fields is not None and _runs(fields) else b""


def handles(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    try:
        lines = Path("/proc", str(pid), "status").read_bytes().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith(b"SigCgt:")), b"0")
    return bool(int(mask, 16) >> (number - 1) & 1)


class Rank:
    """One rank: a process that leads its own session, and the pipes of its output.

    Processes below it may leave its session, and be adopted by the agent when their parents end.
    """

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        answer: BinaryIO | None,
        control: socket.socket | None,
    ) -> None:
        self.rank = rank
        self.process = process
        self.exited = False
        self._outside: dict[int, bytes] = {}  # that have left the session, and when they began
        self.pipes: list[tuple[bytes, Any]] = [(OUT, process.stdout), (ERR, process.stderr)]
        if answer is not None:
            self.pipes.append((ANSWER, answer))
        self._control = control
        if control is not None:
            self.pipes.append((CONTROL, control))

    def tell(self, text: bytes) -> None:
        """Write a line to the rank's socket, unless it is gone or has not read for very long."""
        if self._control is not None:
            try:
                self._control.send(text + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                pass

    def state(self) -> bytes:
        """Return whether a process of its session is stopped (T) or none is (S), and the clock
        ticks that all of them have used with their children that have ended, as b"S 123".

        The process that perseusrun has started may be a shell that waits for the script.
        """
        state, ticks = b"S", 0
        for pid in self.running():
            try:
                fields = _stat(pid)
            except OSError:
                continue
            state = b"T" if fields[0] == b"T" else state
            ticks += sum(map(int, fields[11:15]))
        return b"%s %d" % (state, ticks)

    def running(self) -> Iterator[int]:
        """Yield the processes of its session that run, whatever their groups."""
        for pid in _pids():
            try:
                fields = _stat(pid)
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and _runs(fields):
                yield pid

    def outside(self, now: Snapshot) -> tuple[set[int], set[int]]:
        """Return its processes that have left its session: those that are below a process of the
        session, and those that were so earlier."""
        session = now.session(self.process.pid)
        below = now.below([*session, self.process.pid]) - session
        known = {pid for pid, began in self._outside.items() if now.began(pid) == began}
        adopted = (known | now.below(known)) - session - below
        self._outside = {pid: now.began(pid) for pid in below | adopted}
        return below, adopted

    def signal(self, number: int, before: Snapshot) -> None:
        """Send a signal to all its processes, those that `timeout` or a shell has put into groups
        of their own included. before: taken just now.

        Those that have left its session, such as torchrun's workers, get SIGKILL only as long as
        the process that has started them is there to end them.
        """
        below, adopted = self.outside(before)
        # A stopped process does not handle SIGTERM until it continues.
        for each in (number, signal.SIGCONT):
            try:
                os.killpg(self.process.pid, each)
            except OSError:
                pass
        # Only the last signal looks again for processes that have begun since `before`.
        last = number == signal.SIGKILL
        own = self.running() if last else before.session(self.process.pid)
        _send(number, (pid for pid in own if _group(pid) != self.process.pid))
        _send(number, adopted | below if last else adopted)

    def has_leftovers(self, now: Snapshot) -> bool:
        """Return whether any of its processes still run besides the leader, which has ended."""
        return bool(now.session(self.process.pid) - {self.process.pid}) or any(self.outside(now))

    def inspect(self, number: int) -> None:
        """Send a signal to its processes, but not to those that it would end."""
        for pid in self.running():
            if handles(pid, number):
                try:
                    os.kill(pid, number)
                except OSError:
                    pass


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        except OSError:
            pass


class Agent:
    """Owns this host's ranks from start to end. run() belongs to the main thread."""

    def __init__(self, commands: Any, reports: int, silence: float) -> None:
        """Initialise an agent that reads from a binary stream and writes to a descriptor.

        silence: seconds without a sign of life after which perseusrun counts as lost; 0 = never.
        """
        self._commands = commands
        self._reports = reports
        self._silence = silence
        self._grace = GRACE_SECONDS  # until the job sets it
        self._lost_at = float("inf")  # when perseusrun counts as lost
        self._heartbeat_at = 0.0
        self._has_job = False
        self._muted = False
        self._ranks: list[Rank] = []
        # Excludes reaping while a signal is sent: the pid could belong to another process by then.
        self._lock = threading.Lock()
        self._ending = False
        self._signal_received = 0
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        # Ranks that have ended whose output is still open: their exit status, and until when.
        self._closing: dict[Rank, tuple[int, float]] = {}
        self._exits: queue.SimpleQueue[tuple[Rank, int]] = queue.SimpleQueue()
        self._children_ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Rank] = queue.SimpleQueue()  # for their states
        self._wake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run the job that perseusrun sends; return the exit status once all ranks have ended."""
        hello = {
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
        soft = raise_descriptor_limit()
        # What leaves the session of a rank becomes a child of this process when its parent ends.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        started = self._start(job, soft)
        try:
            self._start_threads(lines, started)
        except RuntimeError as error:
            if str(error) != NO_THREAD:
                raise
            text = "1 " + NO_THREAD + " to watch the ranks: " + MORE_PROCESSES
            self._report(FAILED, job["ranks"][0]["rank"], text.encode())
            self._kill(signal.SIGKILL)
            return 1
        self._forward()
        with self._lock:
            self._signal(signal.SIGKILL)
            for rank in self._ranks:
                rank.process.wait()
            self._ranks = []
        return 0

    def _start_threads(self, lines: Iterator[bytes], started: bool) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: self._children_ended.put(None))
        threading.Thread(target=self._reap, daemon=True).start()
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        threading.Thread(target=self._end_on_signal, daemon=True).start()
        if self._silence:
            threading.Thread(target=self._watch, daemon=True).start()
        if not started:
            self._kill(signal.SIGKILL)
        for rank in self._ranks:
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()

    def on_signal(self, number: int, _: Any) -> None:
        """Handle a signal that is to end this process: end the ranks first, once there is a job."""
        if not self._has_job:
            os._exit(128 + number)
        self._signal_received = self._signal_received or number
        self._signals.put(number)  # for a thread, because the main thread may hold the lock

    def _end_on_signal(self) -> None:
        self._signals.get()
        self._end()

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines that perseusrun sends. Every piece of data counts as a sign of life."""
        rest = bytearray()
        self._on_sign_of_life()
        while True:
            data = self._commands.read1(_CHUNK)
            self._on_sign_of_life()
            if not data:
                return
            rest += data
            if b"\n" in data:
                *lines, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                for line in lines:
                    if line == b"WAIT":
                        self._suspend_silence_check()
                    elif line:
                        yield line

    def _on_sign_of_life(self) -> None:
        if self._silence:
            self._lost_at = time.monotonic() + self._silence
            if not self._has_job:  # there are no ranks to end yet, so SIGALRM may end this process
                signal.setitimer(signal.ITIMER_REAL, self._silence)

    def _suspend_silence_check(self) -> None:
        self._lost_at = float("inf")
        if not self._has_job:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _wait_for_job(self, lines: Iterator[bytes]) -> dict[str, Any] | None:
        """Return the job, or None if perseusrun ends before it sends one."""
        line = next(lines, b"")
        self._has_job = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        return json.loads(line) if line.startswith(b"{") else None

    def _start(self, job: dict[str, Any], descriptors: int) -> bool:
        base = dict(os.environ) if job["keep_environment"] else {}
        base.update(job["environment"])
        for entry in job["ranks"]:
            self._send_heartbeat()
            try:
                self._ranks.append(_start_rank(job, entry, base, descriptors))
            except (OSError, ValueError) as error:
                self._report(
                    FAILED, entry["rank"], _explain(error, job).encode("utf-8", "surrogateescape")
                )
                return False
        return True

    def _listen(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            command, _, rest = line.partition(b" ")
            if command == b"INSPECT":
                for rank in self._ranks:
                    rank.inspect(int(rest))
                continue
            number, _, text = rest.partition(b" ")
            only = self._find(number)
            if rest and only is None:
                continue
            if command == b"KILL":
                self._kill(signal.SIGKILL, None if only is None else [only])
            elif command == b"END" and only is not None:
                self._end_some([only])
            elif command == b"END":
                self._end()
            elif command == b"STATE" and only is not None:
                self._asked.put(only)
                os.write(self._waker, b"s")
            elif command == b"TELL" and only is not None:
                only.tell(text)
        self._end()

    def _find(self, number: bytes) -> Rank | None:
        return next((rank for rank in self._ranks if b"%d" % rank.rank == number), None)

    def _watch(self) -> None:
        """End all ranks and this process once perseusrun has been silent for too long."""
        while True:
            left = self._lost_at - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, self._silence))
        self._muted = True
        self._end()
        time.sleep(self._grace + 1.0)
        self._kill(signal.SIGKILL)
        os._exit(1)  # the main thread may block forever in a write that nobody reads

    def _end(self) -> None:
        with self._lock:  # a signal and perseusrun's END may come at the same time
            is_first, self._ending = not self._ending, True
        if is_first:
            self._end_some(None)

    def _end_strays(self) -> None:
        """Send SIGTERM to adopted processes of unknown ranks, unless END has done so."""
        if not self._ending:
            with self._lock:
                _send(signal.SIGTERM, self._strays(Snapshot()))

    def _end_some(self, ranks: list[Rank] | None) -> None:
        self._kill(signal.SIGTERM, ranks)
        self._kill_later(ranks)

    def _kill_later(self, ranks: list[Rank] | None) -> None:
        timer = threading.Timer(self._grace, self._kill, (signal.SIGKILL, ranks))
        timer.daemon = True
        timer.start()

    def _kill(self, number: int, ranks: list[Rank] | None = None) -> None:
        with self._lock:
            self._signal(number, ranks)

    def _signal(self, number: int, ranks: list[Rank] | None = None) -> None:
        """Send a signal to the processes of ranks; None = of all, and to strays. Needs the lock."""
        before = Snapshot()
        for rank in self._ranks:
            # What is left of a rank that has ended by itself has a moment for its last output.
            is_early = number == signal.SIGTERM and rank in self._closing
            if (ranks is None or rank in ranks) and not is_early:
                rank.signal(number, before)
        if ranks is None:
            _send(number, self._strays(before))

    def _strays(self, now: Snapshot) -> set[int]:
        """Return adopted processes of which nobody knows from which rank they are."""
        strays = now.below([os.getpid()])
        for rank in self._ranks:
            strays -= now.session(rank.process.pid).union(*rank.outside(now))
        return strays

    def _has_leftovers(self) -> bool:
        now = Snapshot()
        return bool(self._strays(now)) or any(rank.has_leftovers(now) for rank in self._ranks)

    def _reap(self) -> None:
        """Let adopted processes go that have ended, which would remain zombies."""
        while True:
            self._children_ended.get()
            with self._lock:
                leaders = {rank.process.pid for rank in self._ranks}
                for pid in Snapshot().zombies(os.getpid()) - leaders:
                    try:
                        os.waitpid(pid, os.WNOHANG)
                    except OSError:
                        pass

    def _wait_for(self, rank: Rank) -> None:
        # WNOWAIT leaves the leader a zombie, so that no other process gets its pid.
        result = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        status = 1
        if result is not None:
            ended = result.si_code == os.CLD_EXITED
            status = result.si_status if ended else 128 + result.si_status
        self._exits.put((rank, status))
        os.write(self._waker, b"x")

    def _forward(self) -> None:
        """Forward output until every rank has exited and none of its processes is left.

        Processes that are left after the grace period are killed.
        """
        self._selector.register(self._wake, selectors.EVENT_READ)
        for rank in self._ranks:
            for kind, pipe in rank.pipes:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (kind, rank))
        give_up = 0.0
        while True:
            if all(rank.exited for rank in self._ranks):
                now = time.monotonic()
                if not give_up:
                    give_up = now + self._grace
                    self._end_strays()
                if not self._has_leftovers():
                    give_up = min(give_up, now)
                if now >= give_up:
                    self._kill(signal.SIGKILL)
                    self._drain()
                    return
            self._send_heartbeat()
            is_waiting = bool(give_up or self._closing)
            for key, _ in self._selector.select(0.05 if is_waiting else self._until_heartbeat()):
                if key.data is not None:
                    self._pass_on(key.fileobj, *key.data)
                elif os.read(self._wake, 1) == b"s":
                    rank = self._asked.get()
                    self._report(STATE, rank.rank, rank.state())
                else:
                    self._note_exits()
            self._end_closed()

    def _send_heartbeat(self) -> None:
        """Send a heartbeat if it is time for one."""
        if self._silence and time.monotonic() >= self._heartbeat_at:
            self._report(ALIVE, 0, b"")

    def _until_heartbeat(self) -> float | None:
        return max(0.0, self._heartbeat_at - time.monotonic()) if self._silence else None

    def _note_exits(self) -> None:
        """Take notice of the ranks that have ended."""
        while not self._exits.empty():  # one byte may have told of several of them
            rank, status = self._exits.get()
            if status == 0 and self._signal_received:  # it has been ended, not finished
                status = 128 + self._signal_received
            patience = 0.0 if self._ending else CLOSE_SECONDS
            self._closing[rank] = status, time.monotonic() + patience
            if status != 0:  # others wait for that
                self._drain(rank)
                self._report(EXIT, rank.rank, str(status).encode())

    def _end_closed(self) -> None:
        """End what ranks have left running, once that has closed their output or had its time.

        A filter that a script has put behind its output (exec > >(tee log)) ends by itself.
        """
        if not self._closing:
            return
        outputs = [key.data for key in self._selector.get_map().values() if key.data is not None]
        is_open = {rank for kind, rank in outputs if kind in (OUT, ERR)}
        moment = time.monotonic()
        ended = []
        for rank, (status, until) in list(self._closing.items()):
            if rank in is_open and moment < until:
                continue
            ended.append(rank)
            self._drain(rank)
            if status == 0:
                self._report(EXIT, rank.rank, b"0")
            rank.exited = True
            del self._closing[rank]
        if not ended:
            return
        with self._lock:
            now = Snapshot()  # one for all, since a host may have many ranks and many processes
            left = [rank for rank in ended if rank.has_leftovers(now)]
            for rank in left:
                rank.signal(signal.SIGTERM, now)
        if left:
            self._kill_later(left)

    def _drain(self, only: Rank | None = None) -> None:
        """Pass on what the pipes hold now, but not what a process that was left running adds."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None and only in (None, key.data[1]):
                left, size = _held(key.fd), 1
                while left > 0 and size > 0:
                    size = self._pass_on(key.fileobj, *key.data)
                    left -= size

    def _pass_on(self, pipe: Any, kind: bytes, rank: Rank) -> int:
        """Report what there is to read, and return its size; 0 if there is nothing, or no more."""
        if pipe not in self._selector.get_map():  # _drain has read its end in the same round
            return 0
        try:
            data = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return 0
        except ConnectionResetError:  # of a socket whose rank has ended without reading everything
            data = b""
        if data:
            self._report(kind, rank.rank, data)
        else:
            self._selector.unregister(pipe)
        return len(data)

    def _report(self, kind: bytes, rank: int, data: bytes) -> None:
        self._write(FRAME.pack(kind, rank, len(data)) + data)

    def _write(self, data: bytes) -> None:
        self._heartbeat_at = time.monotonic() + self._silence / HEARTBEATS
        view = memoryview(data)
        while view and not self._muted:
            try:
                view = view[os.write(self._reports, view) :]
            except OSError:  # perseusrun has ended, so its commands end too, which ends the ranks
                self._muted = True


def _held(descriptor: int) -> int:
    """Return how many bytes a pipe or socket has for its reader."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def _start_rank(
    job: dict[str, Any], entry: dict[str, Any], base: dict[str, str], descriptors: int
) -> Rank:
    environment = {**base, **entry["environment"]}
    call = None if job["call"] is None else _file_with(base64.b64decode(job["call"]))
    inherited: list[int] = []
    answer: BinaryIO | None = None
    control: socket.socket | None = None
    try:
        if job["control"]:
            control, end = socket.socketpair()
            inherited.append(end.detach())
            environment[job["control"]] = str(inherited[-1])
        if call is not None:
            reading, descriptor = os.pipe()
            answer = os.fdopen(reading, "rb", buffering=0)
            inherited.append(descriptor)
            environment[ANSWER_VARIABLE] = str(descriptor)
        parent = os.getpid()

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            # preexec_fn is safe: this process has not started any thread yet.
            return subprocess.Popen(
                command,
                cwd=job["directory"],
                env=environment,
                stdin=subprocess.DEVNULL if call is None else call,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=inherited,
                preexec_fn=lambda: _become_rank(parent, descriptors),  # noqa: PLW1509
            )

        try:
            process = start(job["command"])
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            script = _shell_script(job["command"][0], environment, job["directory"])
            if script is None:
                raise
            process = start(["/bin/sh", script, *job["command"][1:]])
    finally:
        if call is not None:
            call.close()
        for descriptor in inherited:
            os.close(descriptor)
    return Rank(entry["rank"], process, answer, control)


def _shell_script(command: str, environment: dict[str, str], directory: str) -> str | None:
    """Return the path of a command without a line #!, which shells run as a script; None = it is a
    binary."""
    path = command if "/" in command else shutil.which(command, path=environment.get("PATH"))
    if path is None:
        return None
    with open(os.path.join(directory, path), "rb") as file:
        return None if b"\0" in file.read(_BEGINNING) else path


def _file_with(data: bytes) -> Any:
    """Return an anonymous file with `data`, at its start.

    A pipe would block its writer until the rank reads it.
    """
    # A memory file (Python 3.8 or later) works even if the disk is full.
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("call"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _explain(error: Exception, job: dict[str, Any]) -> str:
    """Return 'CODE text', where CODE is the exit status that a shell would return."""
    command = str(job["command"][0])
    if isinstance(error, OSError) and error.filename == job["directory"]:
        return "1 cannot change to directory " + str(job["directory"]) + ": " + str(error.strerror)
    if isinstance(error, FileNotFoundError) and error.filename == command:
        text = "127 " + command + ": command not found"
        if command.endswith(".py") and os.path.exists(os.path.join(job["directory"], command)):
            text += "; did you mean: python " + command
        return text
    if isinstance(error, OSError):
        return "126 " + command + ": " + cause(error)
    return "1 " + command + ": " + str(error)


def main() -> int:
    """Run the agent; return its exit status."""
    # It may be ignored by inheritance, and the kernel would then forget how ranks have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        agent = Agent(sys.stdin.buffer, 1, float(sys.argv[1]))
        for number in _ENDING:
            # Ranks inherit an ignored signal, of nohup or a shell for example, but no handler.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, agent.on_signal)
        return agent.run()
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    # sys.exit would fail: at the interpreter's shutdown, a thread is still reading standard input.
    os._exit(main())
