"""Parsers of what a file, a script or another process gives: any bytes at all, and valid ones with
a part changed, give a value that makes sense, or a ValueError of one line that names where.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perseus.gradients import residuals
from perseus.report import trace
from perseus.run import config_file, hosts
from perseus.run.bootstrap.announcement import announcement, read_announcement

# The same examples in every run; a file for each is made in one folder of the test.
any_example = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NESTED = b"[" * 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def value_or_line(parse: Callable[[], Any], where: str) -> Any:
    """The parser's value; None where it refuses, which must be one line that names where."""
    try:
        return parse()
    except ValueError as error:
        text = str(error)
        assert where in text
        assert len(text.splitlines()) == 1
        return None


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


def assert_usable(found: list[hosts.Host]) -> None:
    for host in found:
        assert host.slots >= 1
        assert host.name
        assert not host.name.startswith("-"), "ssh would take it for an option"
        assert host.name.split() == [host.name]
    assert len({host.name for host in found}) == len(found)


HOSTS = ["a", "b:2", "[::1]:3", "::1", "-oX", "u@-x", "a:0", "٣", "a:٣", "9" * 30, "9" * 5000]
BETWEEN = [":", "=", "slots=2", "#", ",", *" \n\r\x0b\x85\u2028"]
HOST_WORDS = st.lists(st.sampled_from(HOSTS + BETWEEN), max_size=9).map("".join)


@any_example
@given(HOST_WORDS | st.text())
def test_lists_of_hosts(text: str) -> None:
    assert_usable(value_or_line(lambda: hosts.parse_hosts(text), "-H") or [])
    found = value_or_line(
        lambda: hosts.parse_discovered(text, 2, "find.sh"), "--host-discovery-script find.sh"
    )
    assert_usable(found or [])


@any_example
@given(HOST_WORDS.map(lambda text: text.encode()) | st.binary())
def test_hostfiles(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(content)
    found = value_or_line(lambda: hosts.parse_hostfile(str(file)), str(file))
    assert found is None or found
    assert_usable(found or [])


YAML = b"verbose: true\nparams:\n  fusion_threshold_mb: 32\nstall_check:\n  enabled: no\n"


@any_example
@given(st.binary() | changed(YAML) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(NESTED)
@example(b'{"a\\u2028b": 1}')
def test_config_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)

    def flags() -> list[str]:
        return config_file.arguments_of(
            str(file), with_controller=True, with_hosts=True, is_elastic=False
        )

    for word in value_or_line(flags, f"--config-file {file}") or []:
        assert isinstance(word, str)


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
def test_timelines(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "timeline.json"
    file.write_bytes(content)
    found = value_or_line(lambda: trace.read(file), str(file))
    if found is not None:
        begin, end = found.span
        assert begin <= end


HELD = {"layer.weight": (3, b"\1\2\3\4"), "layer.bias": (9, b"")}


@any_example
@given(st.binary() | changed(residuals.pack(HELD, 1)))
@example(NESTED + b"\n.")
@example(b'{"rank": Infinity, "held": []}\n.')
@example(b'{"rank": 0, "held": [[[], 1, 0]]}\n.')
@example(b'{"rank": 0, "held": [["a", 1, -1]]}\n')
@example(b'{"rank": 0, "held": [["a", "b", 0]]}\n.')
def test_saved_residuals(content: bytes) -> None:
    found = value_or_line(lambda: residuals.unpack(content), "[residuals]")
    if found is not None:
        held, rank = found
        assert isinstance(rank, int)
        for key, (layout, data) in held.items():
            assert isinstance(key, str)
            assert isinstance(layout, int)
            assert bytes(data) in content


GIVEN = b"a secret of the user"


@any_example
@given(
    st.binary()
    | changed(announcement("10.0.0.1", 6666, GIVEN, given=True).encode())
    | changed(announcement("10.0.0.1", 6666, b"made", given=False).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.lists(VALUES, min_size=5, max_size=5).map(lambda value: json.dumps(value).encode())
)
@example(NESTED)
@example(b'["h", 1, "", "n", "\xc3\xa9"]')
@example(b'["h", 1, "", "n", "\\ud800"]')
@example(b'["h", 1e400, "", "n", "c"]')
def test_announcements_of_rank_0(content: bytes) -> None:
    for own in (GIVEN, None):
        found = value_or_line(lambda own=own: read_announcement(content, own, 3), "[rendezvous]")  # type: ignore[misc]
        if found is not None:
            host, port, secret = found
            assert isinstance(host, str)
            assert 0 < port < 65536
            assert secret
            assert own is None or (host, port, secret) == ("10.0.0.1", 6666, GIVEN), "not proved"


@pytest.mark.parametrize("given_to_all", [True, False])
def test_announcements_are_read(given_to_all: bool) -> None:
    text = announcement("10.0.0.1", 6666, GIVEN, given_to_all)
    own = GIVEN if given_to_all else None
    assert read_announcement(text, own, 3) == ("10.0.0.1", 6666, GIVEN)
