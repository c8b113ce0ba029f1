"""Finds out which hosts an elastic job may use, and watches for changes.

Source of behaviour: Horovod 0.28.1, horovod.runner.elastic.discovery.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from perseus.run.hosts import Host, parse_discovered

PERIOD_SECONDS = 1.0
_SCRIPT_SECONDS = 60.0


class HostDiscovery(Protocol):
    """A source of hosts. may_change: whether find() may return others later."""

    may_change: bool

    def find(self) -> list[Host]:
        """Return the hosts that may be used now. Raises ValueError, which says why, if unknown."""


class FixedHosts:
    """The same hosts all the time."""

    may_change = False

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts

    def find(self) -> list[Host]:
        """Return the hosts."""
        return self._hosts


class HostDiscoveryFunction:
    """A function that returns {host: slots}."""

    may_change = True

    def __init__(self, function: Callable[[], dict[str, int]]) -> None:
        self._function = function

    def find(self) -> list[Host]:
        """Call the function."""
        try:
            return [Host(str(name), int(slots)) for name, slots in self._function().items()]
        except Exception as error:
            raise ValueError(f"the function that discovers hosts failed: {error!r}") from error


class HostDiscoveryScript:
    """An executable that prints a line `host` or `host:slots` for each host.

    slots: of a host without a number; None makes such a line an error.
    """

    may_change = True

    def __init__(self, path: str, slots: int | None) -> None:
        self._path = path
        self._slots = slots

    def find(self) -> list[Host]:
        """Run the script; a failure, or a line that is wrong, is a ValueError."""
        try:
            ended = subprocess.run(
                [self._path],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=_SCRIPT_SECONDS,
            )
        except OSError as error:
            raise ValueError(f"--host-discovery-script {self._path}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"--host-discovery-script {self._path}: no answer within {_SCRIPT_SECONDS:g} s"
            ) from None
        if ended.returncode != 0:
            said = ended.stderr.strip().splitlines()[-1:] or ["it printed nothing to stderr"]
            raise ValueError(
                f"--host-discovery-script {self._path}: exit status {ended.returncode}: {said[0]}"
            )
        return parse_discovered(ended.stdout, self._slots, self._path)


class Watch:
    """Asks for the hosts once a second on a thread of its own; a context manager.

    The first answer comes in the constructor, whose ValueError is the caller's. A later failure
    leaves the hosts as they are, since a discovery service may be down for a while.
    """

    def __init__(self, discovery: HostDiscovery, waker: int) -> None:
        """waker: the write end of a non-blocking pipe, which gets a byte for each change."""
        self._discovery = discovery
        self._waker = waker
        self._hosts = discovery.find()
        self._complaint = ""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()

    def hosts(self) -> list[Host]:
        """Return the latest answer."""
        with self._lock:
            return self._hosts

    def complaint(self) -> str:
        """Return why the latest question had no answer; "" if it had one."""
        with self._lock:
            return self._complaint

    def _run(self) -> None:
        while not self._ends.wait(PERIOD_SECONDS):
            complaint, hosts = "", None
            try:
                hosts = self._discovery.find()
            except ValueError as error:
                complaint = str(error)
            with self._lock:
                changed = hosts is not None and hosts != self._hosts
                changed = changed or complaint != self._complaint
                self._hosts = self._hosts if hosts is None else hosts
                self._complaint = complaint
            if changed and not self._ends.is_set():
                try:
                    os.write(self._waker, b"h")
                except OSError:  # the job has ended, or a byte waits already
                    pass
