"""Finds out which hosts an elastic job may use, and watches for changes.

Source of behaviour: Horovod 0.28.1, horovod.runner.elastic.discovery.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from perseus.run import signals
from perseus.run.hosts import Host, parse_discovered
from perseus.run.link import is_local, opened

PERIOD_SECONDS = 1.0
_SCRIPT_SECONDS = 60.0
_LAST_SECONDS = 1.0
# Reads the number of a process group, and kills that group unless another line follows.
_GUARD = 'read -r group && { read -r _ || kill -s KILL -- "-$group"; }'


class HostDiscovery(Protocol):
    """A source of hosts. may_change: whether find() may return others later."""

    may_change: bool

    def find(self) -> list[Host]:
        """Return the hosts that may be used now. Raises ValueError, which says why, if unknown."""

    def close(self) -> None:
        """End a find() that another thread has called, if possible."""


class FixedHosts:
    """The same hosts all the time."""

    may_change = False

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts

    def find(self) -> list[Host]:
        """Return the hosts."""
        return self._hosts

    def close(self) -> None:
        """Do nothing."""


class HostDiscoveryFunction:
    """A function that returns {host: slots}."""

    may_change = True

    def __init__(self, function: Callable[[], dict[str, int]]) -> None:
        self._function = function

    def find(self) -> list[Host]:
        """Call the function."""
        try:
            return [Host(str(name), int(slots)) for name, slots in self._function().items()]
        except (Exception, SystemExit) as error:
            raise ValueError(f"the function that discovers hosts failed: {error!r}") from error

    def close(self) -> None:
        """Do nothing."""


class HostDiscoveryScript:
    """A shell command that prints a line `host` or `host:slots` for each host.

    slots: of a host without a number; None makes such a line an error.
    """

    may_change = True

    def __init__(self, command: str, slots: int | None) -> None:
        self._command = command
        self._slots = slots
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def find(self) -> list[Host]:
        """Run the script; a failure, or a line that is wrong, is a ValueError."""
        what = f"--host-discovery-script {self._command}"
        if signals.forgets_children():  # which perseus.run() cannot change in any other thread
            raise ValueError(
                f"{what}: nobody can tell whether it succeeds, since this process ignores SIGCHLD: "
                f"call signal.signal(signal.SIGCHLD, signal.SIG_DFL) before"
            )
        with _guard() as guard:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            guard(process.pid)
            self._process = process
            if self._closed:
                self._kill()
            try:
                output, errors = process.communicate(timeout=_SCRIPT_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_LAST_SECONDS)
                # A process in a session of its own, which the script has left behind, may have
                # them.
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
                process.wait()
                raise ValueError(
                    f"{what}: no answer within {_SCRIPT_SECONDS:g} s: the script, or a process "
                    f"that it has started, has not closed its output"
                ) from None
            finally:
                self._process = None
        if process.returncode != 0:
            said = errors.strip().splitlines()[-1:] or ["it printed nothing to stderr"]
            raise ValueError(f"{what}: exit status {process.returncode}: {said[0]}")
        return parse_discovered(output, self._slots, self._command)

    def close(self) -> None:
        """End the script, if it runs, with all processes that it has started."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Yield a function that takes a process group, which dies if this process does in the block.

    Another process sees to that, since SIGKILL leaves this one no time. The kernel's PDEATHSIG
    would end the script, but not a program that it has started and in which it hangs.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        bufsize=0,
        stdin=subprocess.PIPE,  # which the kernel closes when this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def tell(line: bytes) -> None:
        with suppress(OSError):  # somebody has killed it
            opened(process.stdin).write(line)

    with process:
        try:
            yield lambda group: tell(b"%d\n" % group)
        finally:
            tell(b"\n")


class Watch:
    """Asks for the hosts once a second on a thread of its own; a context manager.

    A failure leaves the hosts as they are, since a discovery service may be down for a while.
    """

    def __init__(self, discovery: HostDiscovery, waker: int) -> None:
        """waker: the write end of a non-blocking pipe, which gets a byte for each change."""
        self._discovery = discovery
        self._waker = waker
        self._hosts: list[Host] | None = None
        self._complaint = ""
        self._local: dict[str, bool] = {}  # of all hosts that have ever been found
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._discovery.close()
        self._thread.join(_LAST_SECONDS)  # a function that hangs is left alone

    def hosts(self) -> list[Host] | None:
        """Return the latest answer; None before the first one."""
        with self._lock:
            return self._hosts

    def complaint(self) -> str:
        """Return why the latest question had no answer; "" if it had one."""
        with self._lock:
            return self._complaint

    def is_local(self, name: str) -> bool:
        """Return whether a host that has been found is this one. Never blocks."""
        with self._lock:
            return self._local[name]

    def _look_up(self, hosts: list[Host]) -> None:
        """Find out which new hosts are this one: a name service may take long, so not later."""
        for host in hosts:
            if host.name not in self._local and not self._ends.is_set():
                local = is_local(host.name)
                with self._lock:
                    self._local[host.name] = local

    def _run(self) -> None:
        while not self._ends.is_set():
            complaint, hosts = "", None
            try:
                found = self._discovery.find()
                self._look_up(found)
                hosts = found
            except (ValueError, OSError) as error:
                complaint = str(error)
            with self._lock:
                changed = hosts is not None and hosts != self._hosts
                changed = changed or complaint != self._complaint
                self._hosts = self._hosts if hosts is None else hosts
                self._complaint = complaint
                if changed and not self._ends.is_set():
                    with suppress(OSError):  # bytes that are not read yet fill the pipe
                        os.write(self._waker, b"h")
            self._ends.wait(PERIOD_SECONDS)
