"""What Python reads that a file, a script, another process or another host gives, as functions of
bytes: TARGETS.

Each gives the bytes to a parser. That has to return values that make sense, or to raise a
ValueError of one line that names where; anything else is an AssertionError, or the parser's own
error. Hypothesis makes bytes for them (test_strange_bytes.py), atheris looks for bytes that reach
new code (fuzz/fuzz_parsers.py), and test_fuzz_corpus.py replays what that has found.
"""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perseus import compute_service
from perseus.gradients import residuals
from perseus.report import trace
from perseus.run import agent, config_file, hosts
from perseus.run.bootstrap import words
from perseus.run.bootstrap.announcement import read_announcement
from perseus.run.reports import Report, Reports

GIVEN = b"a secret of the user"
ADDRESS = "10.0.0.1", 6666
NUMBERS = (3, 4)  # of an agent's processes
_folder = tempfile.TemporaryDirectory(prefix="parsers-")
_FILE = Path(_folder.name, "file")


def value_or_line(parse: Callable[[], Any], where: str) -> Any:
    """The parser's value; None where it refuses, which must be one line that names where."""
    try:
        return parse()
    except ValueError as error:
        text = str(error)
        assert where in text, text
        assert len(text.splitlines()) == 1, text
        return None


def _written(content: bytes) -> Path:
    _FILE.write_bytes(content)
    return _FILE


def _expect_usable(found: list[hosts.Host]) -> None:
    for host in found:
        assert host.slots >= 1
        assert host.name
        assert not host.name.startswith("-"), "ssh would take it for an option"
        assert host.name.split() == [host.name]
    assert len({host.name for host in found}) == len(found)


def host_lists(content: bytes) -> None:
    """A list after -H, and what a script that discovers hosts prints."""
    text = content.decode("utf-8", "surrogateescape")
    _expect_usable(value_or_line(lambda: hosts.parse_hosts(text), "-H") or [])
    found = value_or_line(
        lambda: hosts.parse_discovered(text, 2, "find.sh"), "--host-discovery-script find.sh"
    )
    _expect_usable(found or [])


def hostfile(content: bytes) -> None:
    file = str(_written(content))
    found = value_or_line(lambda: hosts.parse_hostfile(file), file)
    assert found is None or found
    _expect_usable(found or [])


def configuration(content: bytes) -> None:
    """A file for --config-file."""
    file = str(_written(content))

    def flags() -> list[str]:
        return config_file.arguments_of(
            file, with_controller=True, with_hosts=True, is_elastic=False
        )

    for word in value_or_line(flags, f"--config-file {file}") or []:
        assert isinstance(word, str)


def timeline(content: bytes) -> None:
    file = _written(content)
    found = value_or_line(lambda: trace.read(file), str(file))
    if found is not None:
        begin, end = found.span
        assert begin <= end


def saved_residuals(content: bytes) -> None:
    """What checkpoints of TensorFlow have, and files of MXNet at their end."""
    for read in (residuals.unpack, residuals.unpack_at_end):
        found = value_or_line(lambda read=read: read(content), "[residuals]")  # type: ignore[misc]
        if found is not None:
            held, rank = found
            assert isinstance(rank, int)
            for key, (layout, data) in held.items():
                assert isinstance(key, str)
                assert 0 <= layout < 1 << 128
                assert bytes(data) in content


def announced_store(content: bytes) -> None:
    """What rank 0 announces, for a rank with a secret and for one without."""
    for own in (GIVEN, None):
        found = value_or_line(lambda own=own: read_announcement(content, own, 3), "[rendezvous]")  # type: ignore[misc]
        if found is not None:
            host, port, secret = found
            assert isinstance(host, str)
            assert 0 < port < 65536
            assert secret
            assert own is None or found == (*ADDRESS, GIVEN), "not proved"


def _expect_valid(report: Report) -> None:
    kind, number, value = report
    assert kind in (agent.HELLO, agent.ALIVE) or number in NUMBERS
    if kind == agent.HELLO:
        assert value.cores > 0
        value.ssh_connection.split(" ")
    elif kind == agent.FAILED:
        value.text.encode("utf-8", "surrogateescape")
        assert value.status >= 0
    elif kind == agent.STATE:
        assert value.ticks >= 0
    elif kind == agent.EXIT:
        assert value >= 0
    else:
        assert isinstance(value, bytes)


def agent_reports(content: bytes) -> None:
    """What an agent sends, in pieces of a size that the first byte tells: also without its mark,
    which no fuzzer needs to find."""
    size, stream = (content[:1] or b"\0")[0], content[1:]
    for begin in (b"", agent.MARK):
        whole, pieces = Reports(NUMBERS), Reports(NUMBERS)
        expected = whole.read(begin + stream)
        for report in expected:
            _expect_valid(report)
        found = [pieces.read(begin)]
        for first in range(0, len(stream), size + 1):
            found.append(pieces.read(stream[first : first + size + 1]))
        assert list(itertools.chain(*found)) == expected
        assert pieces.problem == whole.problem
        assert len(whole.problem.splitlines()) <= 1


def elastic_words(content: bytes) -> None:
    """What a rank of an elastic job and perseusrun say to each other."""
    for read in (words.from_rank, words.from_launcher):
        word = value_or_line(lambda read=read: read(content), "[elastic]")  # type: ignore[misc]
        if word is not None:
            line = words.line_of(word)
            assert b"\n" not in line
            assert read(line) == word


class _Connection:
    """A client that says `content` and takes everything."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.answer = b""

    def settimeout(self, seconds: float) -> None:
        pass

    def makefile(self, mode: str, size: int) -> io.BytesIO:
        return io.BytesIO(self._content)

    def sendall(self, data: bytes) -> None:
        self.answer += data


class _Server:
    """A compute service that nobody must reach who does not know its key."""

    key = b"a key of the service"

    def trust(self, connection: _Connection) -> bool:
        raise AssertionError("proved without the key")


def compute_service_requests(content: bytes) -> None:
    """What somebody says who does not know the key of a compute service."""
    connection = _Connection(content)
    compute_service._Handler(connection, ("10.0.0.2", 40000), _Server())  # type: ignore[arg-type]
    assert compute_service._SIGNATURE.encode() not in connection.answer, "answered a stranger"


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        host_lists,
        hostfile,
        configuration,
        timeline,
        saved_residuals,
        announced_store,
        agent_reports,
        elastic_words,
        compute_service_requests,
    )
}
