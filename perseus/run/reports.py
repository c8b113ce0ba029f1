"""Reads and checks what the agent of a host reports: another host may send anything.

agent.py describes the bytes. Nothing here blocks or is shared between threads.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from perseus.run import agent

MOST_BYTES = 1 << 22  # of a report; only the text of a failure could have more than 64 KiB
_OF_BYTES = (agent.OUT, agent.ERR, agent.ANSWER, agent.CONTROL)
_OF_HOST = (agent.HELLO, agent.ALIVE)  # the others are about a process


class Hello(NamedTuple):
    """An agent's first report.

    cores: those that its ranks may use. ssh_connection: sshd's variable of this name, or "".
    """

    cores: int
    ssh_connection: str


class State(NamedTuple):
    """How a process is: whether it is stopped, and the clock ticks that it has used."""

    is_stopped: bool
    ticks: int


class Failure(NamedTuple):
    """Why a process could not be started, and the exit status that a shell would give."""

    status: int
    text: str


class Report(NamedTuple):
    """One report.

    kind: see agent.py. number: that of the process that it is about.
    value: a Hello, State or Failure, an exit status, or bytes: of output, an answer, or a socket.
    """

    kind: bytes
    number: int
    value: Any


class Reports:
    """The reports of one agent.

    problem: says what was wrong with the bytes, once something was. No report follows.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        """Initialise. numbers: those of the agent's processes."""
        self._numbers = frozenset(numbers)
        self._received = b""
        self._marked = False
        self.problem = ""

    def read(self, data: bytes) -> list[Report]:
        """Return the reports that `data` completes, up to the first one that is wrong."""
        if self.problem:
            return []
        self._received += data
        if not self._marked:
            _, mark, rest = self._received.partition(agent.MARK)
            if not mark:  # the text of a login shell, however long it may be
                self._received = self._received[1 - len(agent.MARK) :]
                return []
            self._marked, self._received = True, rest
        reports = []
        start = 0
        try:
            while len(self._received) - start >= agent.FRAME.size:
                kind, number, size = agent.FRAME.unpack_from(self._received, start)
                if size > MOST_BYTES:
                    raise ValueError(f"{size} bytes at once")
                end = start + agent.FRAME.size + size
                if end > len(self._received):
                    break
                content = self._received[start + agent.FRAME.size : end]
                reports.append(self._report(kind, number, content))
                start = end
        except ValueError as error:
            self.problem = f"its agent has sent what no agent sends ({error})"
        self._received = self._received[start:]
        return reports

    def _report(self, kind: bytes, number: int, content: bytes) -> Report:
        if kind not in _OF_HOST and number not in self._numbers:
            raise ValueError(f"a report about process {number}, which it does not run")
        if kind == agent.HELLO:
            return Report(kind, number, _hello(content))
        if kind == agent.ALIVE or kind in _OF_BYTES:
            return Report(kind, number, content)
        if kind == agent.EXIT:
            return Report(kind, number, _natural(content))
        if kind == agent.STATE:
            letter, _, ticks = content.partition(b" ")
            return Report(kind, number, State(letter == b"T", _natural(ticks)))
        if kind == agent.FAILED:
            status, _, text = content.partition(b" ")
            return Report(
                kind, number, Failure(_natural(status), text.decode("utf-8", "surrogateescape"))
            )
        raise ValueError(f"a report of kind {kind!r}")


def _hello(content: bytes) -> Hello:
    try:
        found = json.loads(content)
        hello = Hello(found["cores"], found["ssh_connection"])
        if type(hello.cores) is int and hello.cores > 0 and isinstance(hello.ssh_connection, str):
            return hello
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError("a first report that does not describe a host")


def _natural(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise ValueError(f"{text[:20]!r} instead of a number")
    return int(text)
