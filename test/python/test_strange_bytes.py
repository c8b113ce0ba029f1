"""Parsers of what a file, a script, another process or another host gives: any bytes at all, and
valid ones with a part changed, do what parsers.py asks for.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import parsers
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perseus.gradients import residuals
from perseus.run import agent
from perseus.run.bootstrap import words
from perseus.run.bootstrap.announcement import announcement, read_announcement

# The same examples in every run.
any_example = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
NESTED = b"[" * 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def changed(valid: bytes) -> st.SearchStrategy[bytes]:
    """A part of these bytes left out, repeated or replaced by others."""
    place = st.integers(0, len(valid))
    return st.tuples(place, place, st.binary(max_size=4)).map(
        lambda cut: valid[: cut[0]] + cut[2] + valid[cut[1] :]
    )


def with_any_value(valid: Any) -> st.SearchStrategy[bytes]:
    """The JSON of a document in which one value, at any depth, is another one."""

    def replaced(document: Any, path: list[int], value: Any) -> Any:
        if not path or not isinstance(document, (list, dict)) or not document:
            return value
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key = keys[path[0] % len(keys)]
        copy = dict(document) if isinstance(document, dict) else list(document)
        copy[key] = replaced(document[key], path[1:], value)
        return copy

    paths = st.lists(st.integers(0, 40), max_size=4)
    return st.tuples(paths, VALUES).map(
        lambda drawn: json.dumps(replaced(valid, *drawn)).encode(errors="surrogatepass")
    )


HOSTS = ["a", "b:2", "[::1]:3", "::1", "-oX", "u@-x", "a:0", "٣", "a:٣", "9" * 30, "9" * 5000]
BETWEEN = [":", "=", "slots=2", "#", ",", *" \n\r\x0b\x85\u2028"]
HOST_WORDS = st.lists(st.sampled_from(HOSTS + BETWEEN), max_size=9).map("".join)


@any_example
@given(HOST_WORDS | st.text())
def test_lists_of_hosts(text: str) -> None:
    parsers.host_lists(text.encode("utf-8", "surrogatepass"))


@any_example
@given(HOST_WORDS.map(lambda text: text.encode()) | st.binary())
def test_hostfiles(content: bytes) -> None:
    parsers.hostfile(content)


YAML = b"verbose: true\nparams:\n  fusion_threshold_mb: 32\nstall_check:\n  enabled: no\n"


@any_example
@given(st.binary() | changed(YAML) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(NESTED)
@example(b'{"a\\u2028b": 1}')
def test_config_files(content: bytes) -> None:
    parsers.configuration(content)


JOB = {"rank": 1, "size": 2, "start_time_since_epoch_in_micros": 1_000}
TIMELINE = [
    {"name": "job", "ph": "M", "pid": 0, "args": JOB},
    {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "layer.weight"}},
    {"name": "DROPPED_RECORDS", "ph": "M", "pid": 0, "args": {"count": 3}},
    *(
        {"name": name, "ph": "X", "pid": 7, "ts": ts, "dur": 5, "args": {"bytes": 64, "round": 2}}
        for ts, name in ((1, "NEGOTIATE_ALLREDUCE"), (6, "ALLREDUCE"), (7, "EXCHANGE"))
    ),
]


@any_example
@given(st.binary() | changed(json.dumps(TIMELINE).encode()) | with_any_value(TIMELINE))
@example(NESTED)
@example(json.dumps(TIMELINE).encode())
def test_timelines(content: bytes) -> None:
    parsers.timeline(content)


HELD = {"layer.weight": (3, b"\1\2\3\4"), "layer.bias": (9, b"")}


@any_example
@given(
    st.binary() | changed(residuals.pack(HELD, 1)) | changed(b"x" + residuals.pack_at_end(HELD, 1))
)
@example(NESTED + b"\n.")
@example(b'{"rank": Infinity, "held": []}\n.')
@example(b'{"rank": 0, "held": [[[], 1, 0]]}\n.')
@example(b'{"rank": 0, "held": [["a", 1, -1]]}\n')
@example(b'{"rank": 0, "held": [["a", "b", 0]]}\n.')
@example(b'{"rank": 0, "held": [["a", 18446744073709551616, 0]]}\n.')
@example(b"perseus.residuals")
@example(struct.pack("<Q", 1) + b"perseus.residuals")
def test_saved_residuals(content: bytes) -> None:
    parsers.saved_residuals(content)


def test_saved_residuals_are_read() -> None:
    assert residuals.unpack(residuals.pack(HELD, 1)) == (HELD, 1)
    assert residuals.unpack_at_end(b"states" + residuals.pack_at_end(HELD, 1)) == (HELD, 1)
    assert residuals.unpack_at_end(b"states" + residuals.pack_at_end({}, 1)) is None


@any_example
@given(
    st.binary()
    | changed(announcement(*parsers.ADDRESS, parsers.GIVEN, given=True).encode())
    | changed(announcement(*parsers.ADDRESS, b"made", given=False).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.lists(VALUES, min_size=5, max_size=5).map(lambda value: json.dumps(value).encode())
)
@example(NESTED)
@example(b'["h", 1, "", "n", "\xc3\xa9"]')
@example(b'["h", 1, "", "n", "\\ud800"]')
@example(b'["h", 1e400, "", "n", "c"]')
def test_announcements_of_rank_0(content: bytes) -> None:
    parsers.announced_store(content)


@pytest.mark.parametrize("given_to_all", [True, False])
def test_announcements_are_read(given_to_all: bool) -> None:
    text = announcement(*parsers.ADDRESS, parsers.GIVEN, given_to_all)
    own = parsers.GIVEN if given_to_all else None
    assert read_announcement(text, own, 3) == (*parsers.ADDRESS, parsers.GIVEN)


def frame(kind: bytes, number: int, content: bytes) -> bytes:
    return agent.FRAME.pack(kind, number, len(content)) + content


HELLO = {"cores": 2, "ssh_connection": "10.0.0.1 5 10.0.0.2 22"}
REPORTS = [
    frame(agent.HELLO, 0, json.dumps(HELLO).encode()),
    frame(agent.ALIVE, 0, b""),
    frame(agent.OUT, 3, b"a line\n"),
    frame(agent.STATE, 4, b"T 12"),
    frame(agent.FAILED, 4, b"127 a: command not found"),
    frame(agent.EXIT, 3, b"137"),
]


@any_example
@given(
    st.binary()
    | changed(b"\x07" + b"".join(REPORTS))
    | st.lists(st.sampled_from(REPORTS) | st.binary(max_size=12)).map(b"\x03".join)
    | with_any_value(HELLO).map(lambda text: b"\x20" + frame(agent.HELLO, 0, text))
)
@example(b"\0" + frame(agent.HELLO, 0, NESTED))
@example(b"\0" + frame(agent.EXIT, 3, b"9" * 5000))
@example(b"\0" + frame(agent.EXIT, 5, b"1"))
def test_reports_of_agents(content: bytes) -> None:
    parsers.agent_reports(content)


WORDS = [
    words.Join(True, None, 3),
    words.Join(False, True, 0, True),
    words.Begun(2),
    words.Loop(2),
    words.Pong(),
    words.Place(1, False, 2, True, {"HOROVOD_RANK": "1", "A": "\udcff"}),
    words.Leave("the job has finished"),
    words.Refuse("there is no next world"),
    words.News(1.5, 3, False),
    words.Feed(4, 1, 3),
    words.Fed(4, 100),
    words.Ping(),
]


PLACE = b'{"place": {"epoch": 1, "sync": true, "commits": 0, "fed": true, "environment": {%s}}}'


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__.lower())
def test_words_of_elastic_jobs_are_read(word: words.FromRank | words.FromLauncher) -> None:
    of_rank = isinstance(word, words.FromRank)
    read, other = words.from_rank, words.from_launcher
    if not of_rank:
        read, other = other, read
    assert read(words.line_of(word)) == word
    with pytest.raises(ValueError, match="is nothing that"):
        other(words.line_of(word))


@any_example
@given(
    st.binary()
    | st.sampled_from(WORDS).flatmap(lambda word: changed(words.line_of(word)))
    | st.sampled_from(WORDS).flatmap(lambda word: with_any_value(json.loads(words.line_of(word))))
)
@example(NESTED)
@example(b'{"news": [%s, 1, false]}' % (b"9" * 400))
@example(b'{"news": [1e400, 1, false]}')
@example(b'{"feed": [1, 3, 3]}')
@example(b'{"begun": %s}' % (b"9" * 5000))
@example(PLACE % b'"A": "\\u0000"')
@example(PLACE % b'"A": "\\ud800"')
@example(PLACE % b'"A=": "b"')
def test_words_of_elastic_jobs(content: bytes) -> None:
    parsers.elastic_words(content)


@any_example
@given(
    st.binary() | changed(b"GET / HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]")
)
@example("POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n".encode("latin-1"))
def test_requests_to_a_compute_service(content: bytes) -> None:
    parsers.compute_service_requests(content)
