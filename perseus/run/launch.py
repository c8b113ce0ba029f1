"""Starts a job's ranks through an agent per host, passes on their output, ends them together.

One selector; signals wake it through a pipe. A second thread sends heartbeats, for the first may
wait long for somebody to read what the ranks print.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import selectors
import shlex
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from perseus.compat.common.command import HOROVOD_HINT, WITHOUT_HOROVOD
from perseus.compat.common.extensions import env
from perseus.run import agent, environment, signals
from perseus.run.bootstrap.addresses import interface_address, is_own_address, source_address
from perseus.run.hosts import Slot
from perseus.run.link import (
    SILENCE_SECONDS,
    HostLink,
    is_local,
    local_command,
    real_name,
    ssh_command,
)
from perseus.run.output import STDERR, STDOUT, Console, Stream

_CHUNK = 1 << 16
_UNTRUSTED = "Host key verification failed"  # ssh's words for a host key it does not accept
_LAST_GRACE = 5.0  # seconds an agent gets beyond the grace it gives its ranks


class LaunchError(Exception):
    """The job could not start; one line says why. `code` is the launcher's exit status."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Job:
    """What to run where."""

    command: list[str]
    slots: list[Slot]
    start_timeout: int = 60
    # Seconds without a sign of life after which launcher and other hosts take each other for lost.
    silence: float = SILENCE_SECONDS
    grace: float = agent.GRACE_SECONDS  # between the request to end and the signal that kills
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_accept_new_keys: bool = False
    interfaces: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)  # environment variables set by flags
    output_directory: str | None = None
    timestamps: bool = False
    verbose: bool = False
    call: bytes | None = None  # what every rank finds on standard input; None = nothing


class Launcher:
    """One job from its start to its exit status.

    on_answer: called with each piece of a rank's answer to the job's call: (rank, bytes).
    """

    def __init__(self, job: Job, on_answer: Callable[[int, bytes], None] | None = None) -> None:
        self._job = job
        self._on_answer = on_answer
        self._size = len(job.slots)
        self._hosts: list[HostLink] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._console = Console(lambda: self.signalled is not None, self._wake)
        self._streams: dict[tuple[int, bytes], Stream] = {}
        self.signalled: int | None = None
        self.first_failure: tuple[int, int] | None = None  # rank, status
        self._failed_at = 0.0
        self._left: list[tuple[int, float]] = []  # ranks that ended well, and when
        self._misses_horovod = False
        self._error: LaunchError | None = None
        self._ending = False
        self._last_moment: float | None = None  # when agents that do not end are killed
        self._heartbeat_ends = threading.Event()
        self._core: Any = None
        self._server: Any = None

    def run(self) -> int:
        """The launcher's exit status: 0, that of the first rank that failed, or 128 + n when signal
        n ended the job.

        Raises LaunchError when the job could not be started.
        """
        restore_signals = signals.catch(self._on_signal, self._on_stop, self._waker)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            self._run()
            return self._verdict()
        finally:
            restore_signals()
            self._release()

    def _run(self) -> None:
        try:
            self._core = checked_core(self._job.flags)
            self._open_streams()
            self._connect()
            threading.Thread(target=self._send_heartbeats, daemon=True).start()
            self._loop(lambda: all(host.hello is not None for host in self._hosts))
            if not self._ending:
                self._start_ranks()
            self._loop(lambda: False)
        finally:
            self._heartbeat_ends.set()
            for host in self._hosts:
                host.kill()
                host.process.wait()
            for stream in self._streams.values():
                stream.close()
            self._console.close()

    def _release(self) -> None:
        """What would stay open in a process that goes on after this job."""
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        if self._server is not None:
            self._server.close()
        for host in self._hosts:
            host.close()

    def _verdict(self) -> int:
        if self._console.broken and self.signalled is None:
            self.signalled = signal.SIGPIPE
        if self.signalled is not None:
            return 128 + self.signalled
        if self._error is not None:
            raise self._error
        if self.first_failure is None:
            return 0
        rank, status = self.first_failure
        self._say(
            f"{self._name(rank)} was the first to fail, with exit code {status}"
            + (f" ({signal.Signals(status - 128).name})" if _is_signal(status) else "")
            + self._who_left_before()
        )
        if self._misses_horovod:
            self._say(HOROVOD_HINT)
        return status

    def _who_left_before(self) -> str:
        """Names the rank that ended first, without an error: others may have failed for want of
        it."""
        if not self._left:
            return ""
        rank, moment = self._left[0]
        others = f" (and {len(self._left) - 1} more after it)" if len(self._left) > 1 else ""
        return (
            f"; {self._name(rank)} had left {self._failed_at - moment:.1f} s earlier, with exit "
            f"code 0{others}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._job.slots[rank].host}"

    # ---- starting --------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled is not None:
            for host in self._hosts:
                host.kill_ranks()
            if self._job.call is None:  # else the process is the caller's, not ours to end
                os._exit(128 + number)
        self.signalled = number

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z stops this process alone; the ranks go on without its heartbeats."""
        suspended = [host for host in self._hosts if host.suspend()]
        signals.stop(number)
        for host in suspended:
            host.resume()

    def _send_heartbeats(self) -> None:
        while not self._heartbeat_ends.wait(self._job.silence / agent.HEARTBEATS):
            for host in self._hosts:
                host.send_heartbeat()

    def _open_streams(self) -> None:
        width = len(str(self._size - 1))
        for slot in self._job.slots:
            for kind, fd, name in ((agent.OUT, STDOUT, "stdout"), (agent.ERR, STDERR, "stderr")):
                file = None
                if self._job.output_directory is not None:
                    directory = Path(self._job.output_directory) / f"rank.{slot.rank:0{width}}"
                    try:
                        directory.mkdir(parents=True, exist_ok=True)
                        file = (directory / name).open("wb", buffering=0)
                    except OSError as error:
                        raise LaunchError(
                            f"--output-filename {directory}: {error.strerror}"
                        ) from None
                look = self._look_for_horovod if fd == STDERR else None
                stream = Stream(self._console, slot.rank, fd, self._job.timestamps, file, look=look)
                self._streams[slot.rank, kind] = stream

    def _look_for_horovod(self, line: bytes) -> None:
        self._misses_horovod = self._misses_horovod or WITHOUT_HOROVOD.encode() in line

    def _connect(self) -> None:
        for name in dict.fromkeys(slot.host for slot in self._job.slots):
            slots = [slot for slot in self._job.slots if slot.host == name]
            local = is_local(name)
            command = local_command() if local else self._ssh_command(name)
            if self._job.verbose:
                self._say(f"{name}: ranks {slots[0].rank}-{slots[-1].rank}: {shlex.join(command)}")
            try:
                host = HostLink(name, slots, local, command)
            except OSError as error:
                raise LaunchError(f"{command[0]}: {error.strerror}", 127) from None
            self._hosts.append(host)
            for pipe, act in (
                (host.process.stdout, self._on_data),
                (host.process.stderr, self._hear_complaint),
            ):
                self._selector.register(_present(pipe), selectors.EVENT_READ, (act, host))
        self._start_by = time.monotonic() + self._job.start_timeout

    def _ssh_command(self, name: str) -> list[str]:
        job = self._job
        return ssh_command(
            name,
            job.start_timeout,
            job.ssh_port,
            job.ssh_identity_file,
            accept_new_keys=job.ssh_accept_new_keys,
            silence=job.silence,
        )

    def _start_ranks(self) -> None:
        secret = secrets.token_hex(32)
        address = self._own_address()
        try:
            self._server = self._core.StoreServer(address, 0, False, secret.encode())
        except (RuntimeError, OSError) as error:
            raise LaunchError(str(error)) from None
        if self._job.verbose:
            self._say(f"store at {address}:{self._server.port}")
        common = environment.of_job(
            address, self._server.port, secret, self._job.interfaces, self._job.flags
        )
        directory = _current_directory()
        call = None if self._job.call is None else base64.b64encode(self._job.call).decode()
        threads = {} if os.environ.get("OMP_NUM_THREADS") else self._share_cores()
        for host in self._hosts:
            if host.name in threads:
                common["OMP_NUM_THREADS"] = str(threads[host.name])
            base = environment.local_base if host.local else environment.remote_base
            job = {
                "command": self._job.command,
                "directory": directory,
                "call": call,
                "grace": self._job.grace,
                "keep_environment": not host.local,
                "environment": base(os.environ) | common,
                "ranks": [
                    {"rank": slot.rank, "environment": environment.of_rank(slot, self._size)}
                    for slot in host.slots
                ],
            }
            host.send(json.dumps(job).encode() + b"\n")
            host.alive_at = time.monotonic()

    def _share_cores(self) -> dict[str, int]:
        """OMP_NUM_THREADS of each host."""
        threads = {}
        reasons = []
        for host in self._hosts:
            cores = _present(host.hello)["cores"]
            threads[host.name] = max(1, cores // len(host.slots))
            reasons.append(f"{threads[host.name]} on {host.name} ({cores} / {len(host.slots)})")
        if self._job.verbose:
            self._say("OMP_NUM_THREADS = cores / ranks as it was not set: " + ", ".join(reasons))
        return threads

    def _own_address(self) -> str:
        """The store's address for all hosts: loopback on one host, else towards the first other."""
        others = [host for host in self._hosts if not host.local]
        if self._job.interfaces:
            try:
                return interface_address(self._job.interfaces[0])
            except ValueError as error:
                raise LaunchError(str(error)) from None
        if not others:
            return "127.0.0.1"
        seen = str(_present(others[0].hello)["ssh_connection"]).split(" ")[0]
        # What the other host saw as ssh's origin is this host, unless a jump host is in between.
        if "." in seen and is_own_address(seen):
            return seen
        return source_address(real_name(others[0].name)) or seen

    # ---- running ---------------------------------------------------------------------------------

    def _loop(self, done: Callable[[], bool]) -> None:
        """Handle what comes until `done` or until every agent is gone."""
        while not done() and not all(host.gone for host in self._hosts):
            # A process that was stopped may see nothing, for once, of what came meanwhile.
            before = time.monotonic()
            events = self._selector.select(self._patience())
            now = time.monotonic()
            for key, _ in events:
                data = os.read(key.fd, _CHUNK)
                if key.data is not None:
                    act, host = key.data
                    host.alive_at = max(host.alive_at, now)
                    if not data:
                        self._selector.unregister(key.fileobj)
                    act(host, data)
            self._attend()
            self._give_up_silent_hosts(before)

    def _patience(self) -> float:
        moments = [moment for stream in self._streams.values() if (moment := stream.due())]
        moments += [self._last_moment] if self._last_moment else []
        moments += [self._start_by] if not self._started() else []
        moments += [host.alive_at + self._job.silence for host in self._heartbeating()]
        return max(0.0, min(moments) - time.monotonic()) if moments else 3600.0

    def _started(self) -> bool:
        return all(host.hello is not None for host in self._hosts)

    def _attend(self) -> None:
        """Whatever is due by the clock or by a signal."""
        now = time.monotonic()
        for stream in self._streams.values():
            if (moment := stream.due()) and moment <= now:
                stream.show_rest()
        if self.signalled is not None or self._console.broken:
            self._end()
        if not self._started() and now >= self._start_by and not self._ending:
            late = ", ".join(host.name for host in self._hosts if host.hello is None)
            self._fail(
                LaunchError(
                    f"no answer from {late} within {self._job.start_timeout} s (--start-timeout)"
                )
            )
        if self._last_moment and now >= self._last_moment:
            for host in self._hosts:
                host.kill()
            self._last_moment = None

    def _heartbeating(self) -> list[HostLink]:
        """The hosts that should give signs of life."""
        return [host for host in self._hosts if not (host.local or host.gone)]

    def _give_up_silent_hosts(self, now: float) -> None:
        """now: a moment up to which all reports have been read."""
        for host in self._heartbeating():
            if now >= host.alive_at + self._job.silence:
                self._fail(
                    LaunchError(
                        f"{host.name}: no sign of life for {self._job.silence:g} s while ranks "
                        f"{sorted(host.running)} ran: the host or the network to it is down; its "
                        f"ranks end by themselves"
                    )
                )
                host.kill()

    def _on_data(self, host: HostLink, data: bytes) -> None:
        for kind, rank, content in host.frames(data):
            if kind == agent.HELLO:
                host.hello = json.loads(content)
            elif kind in (agent.OUT, agent.ERR):
                self._streams[rank, kind].feed(content)
            elif kind == agent.ANSWER and self._on_answer is not None:
                self._on_answer(rank, content)
            elif kind == agent.EXIT:
                self._rank_exited(host, rank, int(content))
            elif kind == agent.FAILED:
                code, _, text = content.decode(errors="replace").partition(" ")
                where = "" if host.local else f" (on {host.name})"
                self._fail(LaunchError(text + where, int(code)))
        if not data:
            self._agent_ended(host)

    def _hear_complaint(self, host: HostLink, data: bytes) -> None:
        text = data.decode(errors="replace")
        if text.strip():
            host.last_words = text.strip().splitlines()[-1]
            if self._job.verbose:
                self._say(f"{host.name}: {text.rstrip()}")

    def _rank_exited(self, host: HostLink, rank: int, status: int) -> None:
        host.running.discard(rank)
        for kind in (agent.OUT, agent.ERR):
            self._streams[rank, kind].flush()
        if self._ending:
            return
        if status == 0:
            self._left.append((rank, time.monotonic()))
            return
        self.first_failure, self._failed_at = (rank, status), time.monotonic()
        self._say(f"Process {rank} exit with status code {status}.", "")
        if any(other.running for other in self._hosts):
            self._say(f"Terminating remaining workers after failure of Process {rank}.", "")
        self._end()

    def _agent_ended(self, host: HostLink) -> None:
        host.gone = True
        if not self._ending and (host.hello is None or host.running):
            status = host.process.wait()
            complaints = _present(host.process.stderr)
            os.set_blocking(complaints.fileno(), False)
            self._hear_complaint(host, complaints.read() or b"")
            if host.hello is None:
                fact = f"{host.name}: could not be reached by ssh"
            else:
                fact = f"{host.name}: the connection broke while ranks {sorted(host.running)} ran"
            if host.local:
                fact = f"{host.name}: the process that runs the ranks ended with status {status}"
            fact += f": {host.last_words}" if host.last_words else ""
            if host.last_words.startswith(_UNTRUSTED):
                fact += (
                    f"; 'ssh {host.name}' shows why: accept the key there if the host is new, or "
                    f"give --ssh-accept-new-keys"
                )
            self._fail(LaunchError(fact))

    def _fail(self, error: LaunchError) -> None:
        if self._error is None and not self._ending:
            self._error = error
        self._end()

    def _end(self) -> None:
        """Ask all agents to end their ranks; they kill what does not end in time."""
        if not self._ending:
            self._ending = True
            self._last_moment = time.monotonic() + self._job.grace + _LAST_GRACE
            for host in self._hosts:
                if host.hello is None:
                    host.kill()
                else:
                    host.send(b"END\n")

    def _say(self, text: str, prefix: str = "perseusrun: ") -> None:
        self._console.show(STDERR, f"{prefix}{text}\n".encode())


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchError(f"the current directory is gone: {error.strerror}") from None


def checked_core(flags: dict[str, str]) -> Any:
    """The native core, once it has found every variable of the job's environment sound."""
    try:
        core = import_module("perseus._core")
    except ImportError as error:
        raise LaunchError(
            f"perseus is not installed whole: {error}; pip install it again"
        ) from None
    try:
        with env(**flags):  # they come before the environment, for the check as for the ranks
            core.config_check()
    except ValueError as error:
        raise LaunchError(str(error), 2) from None
    return core


def _is_signal(status: int) -> bool:
    return status - 128 in set(signal.Signals)


def _present(value: Any) -> Any:
    assert value is not None
    return value
