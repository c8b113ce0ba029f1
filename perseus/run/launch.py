"""Runs a job: starts its ranks through one agent per host, prints their output, ends them together.

One thread waits for everything with one selector, which signals wake through a pipe. A second
thread sends heartbeats, because the first one blocks while nobody reads the ranks' output.
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import shlex
import signal
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from perseus.compat.common.command import HOROVOD_HINT, WITHOUT_HOROVOD
from perseus.run import agent, environment, host_start, signals
from perseus.run.job import Job, LaunchError, checked_core
from perseus.run.link import (
    KILL_SECONDS,
    HostLink,
    is_local,
    local_command,
    opened,
    ssh_command,
)
from perseus.run.output import STDERR, STDOUT, Console, Stream
from perseus.run.reports import State

__all__ = ["Job", "LaunchError", "Launcher"]

_CHUNK = 1 << 16
_UNTRUSTED = "Host key verification failed"  # how ssh's message about a rejected host key begins
_AGENT_GRACE = 5.0  # seconds that agents get to end, beyond the grace period of their ranks
# Terminals that close, and service managers, send a second signal right behind the first.
_SAME_REQUEST_SECONDS = 1.0


class Launcher:
    """Runs one job, once.

    on_answer: is called as on_answer(rank, data) with each piece of a rank's answer to the job's
        call.
    signalled: the signal that has ended the job; None without one.
    first_failure: rank and exit status of the rank that failed first; None without one.
    """

    def __init__(self, job: Job, on_answer: Callable[[int, bytes], None] | None = None) -> None:
        _occupy_standard_descriptors()
        self._job = job
        self._on_answer = on_answer
        self._hosts: list[HostLink] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._console = Console(lambda: self.signalled is not None, self._wake)
        self._streams: dict[tuple[int, bytes], Stream] = {}
        self.signalled: int | None = None
        self._signalled_at = 0.0
        self.first_failure: tuple[int, int] | None = None
        self._failed_at = 0.0
        self._succeeded: list[tuple[int, float]] = []  # ranks with exit code 0, and when they ended
        self._lacks_horovod = False
        self._error: LaunchError | None = None
        self._ending = False
        self._inspected = 0  # the signal that has asked what ranks wait for
        self._kill_at: float | None = None  # when to kill agents that have not ended
        self._heartbeat_ends = threading.Event()
        self._core: Any = None
        self._server: Any = None
        self._secret = secrets.token_hex(32)
        self._descriptors = 0  # this process's limit before it was raised

    def run(self) -> int:
        """Run the job and return the launcher's exit status.

        It is 0 if all ranks succeeded, that of the first rank that failed, or 128 + n if signal n
        ended the job. Raises LaunchError if the job could not start or a host was lost.
        """
        try:
            restore_signals = signals.catch(
                self._on_signal, self._on_stop, self._on_inspect, self._waker
            )
        except ValueError:
            self._release()
            raise
        self._descriptors = agent.raise_descriptor_limit()
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            self._run()
            return self._exit_status()
        finally:
            restore_signals()
            self._release()
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._descriptors, hard))

    def _run(self) -> None:
        try:
            self._core = checked_core(self._job.flags)
            # To look up and connect the other hosts may take longer than the first one waits.
            threading.Thread(target=self._send_heartbeats, daemon=True).start()
            self._prepare()
            self._start_and_wait()
        except RuntimeError as error:
            if str(error) != agent.NO_THREAD:
                raise
            raise LaunchError(f"{error}: {agent.MORE_PROCESSES}") from None
        finally:
            self._heartbeat_ends.set()
            for host in self._hosts:
                host.kill()
                host.process.wait()
            for stream in self._streams.values():
                stream.close()
            self._console.close()

    def _release(self) -> None:
        """Close descriptors, which would leak in a process that runs several jobs."""
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        if self._server is not None:
            self._server.close()
        for host in self._hosts:
            host.close()

    def _exit_status(self) -> int:
        if self._console.broken and self.signalled is None:
            self.signalled = signal.SIGPIPE
        if self.signalled is not None:
            return 128 + self.signalled
        if self._error is not None:
            raise self._error
        if self.first_failure is None:
            return 0
        rank, status = self.first_failure
        self._print(
            f"{self.name_of(rank)} was the first to fail, with exit code {status}"
            + (f" ({signal.Signals(status - 128).name})" if _is_signal(status) else "")
            + self._earlier_exit()
        )
        if self._lacks_horovod:
            self._print(HOROVOD_HINT)
        return status

    def _earlier_exit(self) -> str:
        """Describe the first rank that ended without an error, as others may have failed because
        it was missing."""
        if not self._succeeded:
            return ""
        rank, moment = self._succeeded[0]
        others = (
            f" (and {len(self._succeeded) - 1} more after it)" if len(self._succeeded) > 1 else ""
        )
        return (
            f"; {self.name_of(rank)} had left {self._failed_at - moment:.1f} s earlier, with exit "
            f"code 0{others}"
        )

    def name_of(self, number: int) -> str:
        """Return the name of a process for messages: its rank and its host."""
        return f"rank {number} on {self._job.slots[number].host}"

    def ranks(self) -> list[int]:
        """Return the numbers of the processes, ordered by rank."""
        return [slot.rank for slot in self._job.slots]

    # ---- starting --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Start what the job needs before its first event."""
        for slot in self._job.slots:
            self._open_streams(slot.rank, slot.rank)
        for name in dict.fromkeys(slot.host for slot in self._job.slots):
            self._connect(name, [slot.rank for slot in self._job.slots if slot.host == name])

    def _start_and_wait(self) -> None:
        """Start the ranks once all hosts have answered, and return when everything has ended."""
        self._loop(lambda: all(host.hello is not None for host in self._hosts))
        if not self._ending:
            self._start_ranks()
        self._loop(lambda: False)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signalled is not None:
            if number != signal.SIGINT and now < self._signalled_at + _SAME_REQUEST_SECONDS:
                return
            for host in self._hosts:
                host.order_to_kill()
            for host in self._hosts:
                host.wait_or_kill(now + KILL_SECONDS)
            if self._job.call is None:  # perseus.run() must not end its caller's process
                os._exit(128 + number)
        self.signalled, self._signalled_at = number, now

    def _on_inspect(self, number: int, frame: FrameType | None) -> None:
        self._inspected = number

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Let Ctrl-Z stop this process only: agents run on and do not expect its heartbeats."""
        suspended = [host for host in self._hosts if host.suspend()]
        signals.stop(number)
        for host in suspended:
            host.resume()

    def _send_heartbeats(self) -> None:
        while not self._heartbeat_ends.wait(self._job.silence / agent.HEARTBEATS):
            for host in list(self._hosts):  # to which the main thread adds
                host.send_heartbeat()

    def _open_streams(self, number: int, rank: int) -> None:
        """Open the output of a process. number: which one; rank: what stands before its lines."""
        width = len(str(len(self._job.slots) - 1)) if self._job.slots else 1
        for kind, fd, name in ((agent.OUT, STDOUT, "stdout"), (agent.ERR, STDERR, "stderr")):
            file = None
            if self._job.output_directory is not None:
                directory = Path(self._job.output_directory) / f"rank.{number:0{width}}"
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    file = (directory / name).open("wb", buffering=0)
                except OSError as error:
                    if not self._is_under_way():
                        text = f"--output-filename {directory}: {agent.cause(error)}"
                        raise LaunchError(text) from None
                    self._console.warn(str(directory / name), error)
            look = self._look_for_horovod if fd == STDERR else None
            stream = Stream(self._console, rank, fd, self._job.timestamps, file, look=look)
            self._streams[number, kind] = stream

    def _is_under_way(self) -> bool:
        """Return whether so much has been done that a full disk must not end it."""
        return False

    def _look_for_horovod(self, line: bytes) -> None:
        self._lacks_horovod = self._lacks_horovod or WITHOUT_HOROVOD.encode() in line

    def _connect(self, name: str, numbers: list[int]) -> HostLink:
        """Start the agent that will run these processes on a host."""
        local = self._is_local(name)
        command = local_command() if local else self._ssh_command(name)
        if self._job.verbose:
            self._print(f"{name}: ranks {numbers[0]}-{numbers[-1]}: {shlex.join(command)}")
        try:
            host = HostLink(name, numbers, local, command, self._descriptors)
        except OSError as error:
            status = 127 if isinstance(error, FileNotFoundError) else 1
            raise LaunchError(f"{command[0]}: {agent.cause(error)}", status) from None
        host.start_by = time.monotonic() + self._job.start_timeout
        self._hosts.append(host)
        for pipe, act in (
            (host.process.stdout, self._on_stdout),
            (host.process.stderr, self._on_stderr),
        ):
            self._selector.register(opened(pipe), selectors.EVENT_READ, (act, host))
        return host

    def _is_local(self, name: str) -> bool:
        return is_local(name)

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
        job, hosts = self._job, self._hosts
        address = host_start.store_address(hosts, job.interfaces)
        self._serve(address)
        if job.verbose and self._shares_cores():
            self._print_threads()
        common = environment.of_job(
            address, self._server.port, self._secret, job.interfaces, job.flags
        )
        for host in hosts:
            ranks = [
                (slot.rank, environment.of_rank(slot, len(job.slots)))
                for slot in job.slots
                if slot.host == host.name
            ]
            self._start_on(host, ranks, common)

    def _serve(self, address: str) -> None:
        """Start the store, through which the ranks find each other."""
        try:
            self._server = self._core.StoreServer(address, 0, False, self._secret.encode())
        except (RuntimeError, OSError) as error:
            raise LaunchError(str(error)) from None
        if self._job.verbose:
            self._print(f"store at {address}:{self._server.port}")

    @staticmethod
    def _shares_cores() -> bool:
        return not os.environ.get("OMP_NUM_THREADS")

    def _start_on(
        self,
        host: HostLink,
        ranks: list[tuple[int, dict[str, str]]],
        common: dict[str, str],
        *,
        control: bool = False,
    ) -> None:
        threads = host_start.threads_per_rank(host) if self._shares_cores() else None
        host.send(
            host_start.start_message(self._job, host, ranks, common, threads, control=control)
        )
        host.given_job = True
        host.alive_at = time.monotonic()

    def _print_threads(self) -> None:
        threads = ", ".join(
            f"{host_start.threads_per_rank(host)} on {host.name} "
            f"({host_start.cores(host)} / {host.shared_by})"
            for host in self._hosts
        )
        self._print(f"OMP_NUM_THREADS = cores / ranks as it was not set: {threads}")

    # ---- running ---------------------------------------------------------------------------------

    def _loop(self, done: Callable[[], bool]) -> None:
        """Handle events until done() is true or every agent has ended."""
        while not done() and not self._has_ended():
            # Right after this process was stopped, select() may not report what has arrived.
            before = time.monotonic()
            events = self._selector.select(self._seconds_to_deadline())
            now = time.monotonic()
            for key, _ in events:
                try:
                    data = os.read(key.fd, _CHUNK)
                except BlockingIOError:  # _agent_ended has read it in the same round
                    continue
                if key.data is not None:
                    act, host = key.data
                    host.alive_at = max(host.alive_at, now)
                    if not data:
                        self._selector.unregister(key.fileobj)
                    act(host, data)
            self._check_deadlines(before)
            self._give_up_silent_hosts(before)

    def _has_ended(self) -> bool:
        return all(host.gone for host in self._hosts)

    def _deadlines(self) -> list[float]:
        """Return when to wake up, in time.monotonic() seconds, even if nothing happens."""
        deadlines = [due for stream in self._streams.values() if (due := stream.due())]
        deadlines += [self._kill_at] if self._kill_at else []
        deadlines += [host.start_by for host in self._silent_since_start()]
        deadlines += [self._silent_at(host) for host in self._monitored_hosts()]
        return deadlines

    def _seconds_to_deadline(self) -> float:
        return max(0.0, min(3600.0, min(self._deadlines(), default=inf) - time.monotonic()))

    def _silent_since_start(self) -> list[HostLink]:
        """Return the hosts that have not answered yet."""
        return [host for host in self._hosts if host.hello is None and not host.gone]

    def _check_deadlines(self, before: float) -> None:
        """Act on deadlines that have passed and on signals that have arrived.

        before: a time.monotonic() up to which everything has been read. What others should have
        done by then is missing.
        """
        now = time.monotonic()
        for stream in self._streams.values():
            if (due := stream.due()) and due <= now:
                stream.show_rest()
        if self.signalled is not None or self._console.broken:
            self._end()
        if self._inspected:
            for host in self._hosts:
                if host.given_job:
                    host.send(b"INSPECT %d\n" % self._inspected)
            self._inspected = 0
        late = [host for host in self._silent_since_start() if before >= host.start_by]
        if late and not self._ending:
            names = ", ".join(host.name for host in late)
            error = f"no answer from {names} within {self._job.start_timeout} s (--start-timeout)"
            self._on_lost_hosts(late, LaunchError(error))
        if self._kill_at and now >= self._kill_at:
            for host in self._hosts:
                host.kill()
            self._kill_at = None

    def _monitored_hosts(self) -> list[HostLink]:
        """Return the hosts that must send heartbeats."""
        return [host for host in self._hosts if host.given_job and not (host.local or host.gone)]

    def _silent_at(self, host: HostLink) -> float:
        """Return when a host will have been silent for too long."""
        if host.running:
            return host.alive_at + self._job.silence
        return host.alive_at + self._job.silence / agent.HEARTBEATS + _AGENT_GRACE

    def _give_up_silent_hosts(self, now: float) -> None:
        """End the job if a host has been silent for too long while its ranks ran.

        Without ranks, its agent has ended, but something that the login shell has started may keep
        the connection open.

        now: a time.monotonic() up to which all frames have been read.
        """
        for host in self._monitored_hosts():
            if now < self._silent_at(host):
                continue
            if host.running:
                error = LaunchError(
                    f"{host.name}: no sign of life for {self._job.silence:g} s while ranks "
                    f"{sorted(host.running)} ran: the host or the network to it is down; its "
                    f"ranks end by themselves"
                )
                self._on_lost_hosts([host], error)
            host.alive_at = inf
            host.kill()

    def _on_stdout(self, host: HostLink, data: bytes) -> None:
        for kind, number, value in host.reports.read(data):
            if kind == agent.HELLO:
                host.hello = value
            elif kind in (agent.OUT, agent.ERR):
                self._streams[number, kind].feed(value)
            elif kind == agent.ANSWER and self._on_answer is not None:
                self._on_answer(number, value)
            elif kind == agent.EXIT:
                self._rank_exited(host, number, value)
            elif kind == agent.CONTROL:
                self._on_control(number, value)
            elif kind == agent.STATE:
                self._on_state(number, value)
            elif kind == agent.FAILED:
                where = "" if host.local else f" (on {host.name})"
                self._on_unstartable(LaunchError(value.text + where, value.status))
        if host.reports.problem and not host.lost:
            self._on_lost_hosts([host], LaunchError(f"{host.name}: {host.reports.problem}"))
            host.lost = True
            host.kill()
        if not data:
            self._agent_ended(host)

    def _on_stderr(self, host: HostLink, data: bytes) -> None:
        text = data.decode(errors="replace")
        if text.strip():
            host.last_error = text.strip().splitlines()[-1]
            if self._job.verbose:
                self._print(f"{host.name}: {text.rstrip()}")

    def _rank_exited(self, host: HostLink, rank: int, status: int) -> None:
        host.running.discard(rank)
        for kind in (agent.OUT, agent.ERR):
            self._streams[rank, kind].flush()
        if self._ending:
            return
        if status == 0:
            self._succeeded.append((rank, time.monotonic()))
            return
        self.first_failure, self._failed_at = (rank, status), time.monotonic()
        self._print(f"Process {rank} exit with status code {status}.", "")
        if any(other.running for other in self._hosts):
            self._print(f"Terminating remaining workers after failure of Process {rank}.", "")
        self._end()

    def _agent_ended(self, host: HostLink) -> None:
        host.gone = True
        if not self._ending and (host.hello is None or host.running):
            status = host.process.wait()
            stderr = opened(host.process.stderr)
            os.set_blocking(stderr.fileno(), False)
            self._on_stderr(host, stderr.read() or b"")
            if host.hello is None:
                fact = f"{host.name}: could not be reached by ssh"
            else:
                fact = f"{host.name}: the connection broke while ranks {sorted(host.running)} ran"
            if host.local:
                fact = f"{host.name}: the process that runs the ranks ended with status {status}"
            fact += f": {host.last_error}" if host.last_error else ""
            if host.last_error.startswith(_UNTRUSTED):
                fact += (
                    f"; 'ssh {host.name}' shows why: accept the key there if the host is new, or "
                    f"give --ssh-accept-new-keys"
                )
            self._on_lost_hosts([host], LaunchError(fact))

    def _on_lost_hosts(self, hosts: list[HostLink], error: LaunchError) -> None:
        """Handle hosts that cannot be reached, or not any more."""
        self._fail(error)

    def _on_unstartable(self, error: LaunchError) -> None:
        """Handle that an agent could not start a process; it then ends."""
        self._fail(error)

    def _on_control(self, number: int, data: bytes) -> None:
        """Handle what a process of an elastic job has written to its socket."""

    def _on_state(self, number: int, state: State) -> None:
        """Handle the state of a process of an elastic job."""

    def _fail(self, error: LaunchError) -> None:
        if self._error is None and not self._ending:
            self._error = error
        self._end()

    def _end(self) -> None:
        """Tell all agents to end their ranks; agents kill ranks that do not end in time."""
        if not self._ending:
            self._ending = True
            self._kill_at = time.monotonic() + self._job.grace + _AGENT_GRACE
            for host in self._hosts:
                if host.hello is None:
                    host.kill()
                else:
                    host.send(b"END\n")

    def _print(self, text: str, prefix: str = "perseusrun: ") -> None:
        self._console.show(STDERR, f"{prefix}{text}\n".encode("utf-8", "surrogateescape"))


def _occupy_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, or what is opened next would be taken for them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _is_signal(status: int) -> bool:
    return status - 128 in set(signal.Signals)
