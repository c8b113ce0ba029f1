"""start_timeline and stop_timeline of a world of one: errors, restarts, what is in which file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perseus import basics, errors

BARRIER = 5


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[[str], None]]]:
    """started(HOROVOD_TIMELINE) -> a function that runs one operation of a name."""

    def start(value: object | None) -> Callable[[str], None]:
        if value is not None:
            monkeypatch.setenv("HOROVOD_TIMELINE", str(value))
        basics.init()
        operations = basics.operations(lambda *_: None, None)
        assert operations is not None

        def run(name: str) -> None:
            handle = operations.submit(BARRIER, name, None)
            operations.synchronize(handle)

        return run

    yield start
    basics.shutdown()


def names(path: Path) -> set[str]:
    """Of all tensors of a trace, which must be a whole JSON array."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    rows = [event for event in events if event["name"] == "process_name" and event["pid"] > 1]
    return {row["args"]["name"] for row in rows}


def test_before_init_it_is_an_error(tmp_path: Path) -> None:
    for call in (lambda: basics.start_timeline(tmp_path / "t.json"), basics.stop_timeline):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init\(\)\."):
            call()


def test_without_the_variable_it_is_an_error(started: Any, tmp_path: Path) -> None:
    started(None)
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC"):
        basics.start_timeline(tmp_path / "t.json")
    basics.stop_timeline()
    assert list(tmp_path.iterdir()) == []


def test_dynamic_records_between_start_and_stop(started: Any, tmp_path: Path) -> None:
    run = started("DYNAMIC")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    basics.stop_timeline()
    run("before")
    basics.start_timeline(str(first), mark_cycles=True)
    run("one")
    basics.start_timeline(first)
    run("two")
    basics.stop_timeline()
    run("between")
    basics.stop_timeline()
    assert names(first) == {"one", "two"}
    assert "CYCLE_START" in first.read_text()
    basics.start_timeline(second)
    run("three")
    basics.start_timeline(tmp_path / "third.json")
    assert names(second) == {"three"}
    assert "CYCLE_START" not in second.read_text()
    run("four")
    basics.shutdown()
    assert names(tmp_path / "third.json") == {"four"}
    assert names(first) == {"one", "two"}


def test_names_of_files_are_any_bytes(started: Any, tmp_path: Path) -> None:
    run = started("DYNAMIC")
    path = tmp_path / os.fsdecode(b"\xff.json")
    basics.start_timeline(path)
    run("one")
    basics.stop_timeline()
    assert names(path) == {"one"}


def test_a_file_named_at_start_is_written_from_there(started: Any, tmp_path: Path) -> None:
    run = started(tmp_path / "trace.json")
    assert names(tmp_path / "trace.json") == set()
    run("one")
    basics.start_timeline(tmp_path / "other.json")
    assert names(tmp_path / "trace.json") == {"one"}


def test_a_file_that_cannot_be_written_is_named(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started("DYNAMIC")
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot write '.*no/t\.json': No such"):
        basics.start_timeline(tmp_path / "no" / "t.json")
    basics.shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "no" / "t.json"))
    with pytest.raises(ValueError, match=r"Horovod initialization failed: \[timeline\] cannot"):
        basics.init()


def test_pipes_are_refused(started: Any, tmp_path: Path) -> None:
    started("DYNAMIC")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader, writer = os.pipe()
    for path, why in ((f"/dev/fd/{writer}", "Illegal seek"), (fifo, "No such device or address")):
        with pytest.raises(ValueError, match=rf"cannot write '{path}': {why}\. Name a file"):
            basics.start_timeline(path)
    os.close(reader)
    os.close(writer)
