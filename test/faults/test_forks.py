"""Forked children: they cannot use the parent's world, and do not keep it alive when it dies."""

from __future__ import annotations

import signal
from pathlib import Path

import leftovers
import pytest
from live_ranks import Ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_forked_child_gets_one_clear_error_and_holds_nothing(tmp_path, transport):
    with Ranks(tmp_path, ["fork"], 2, PERSEUS_TRANSPORT=transport) as ranks:
        for rank in range(2):
            assert ranks.note(rank, "child.holds")["links"] == []
            errors = [note for note in ranks.notes(rank) if note["event"] == "child"]
            assert [error["use"] for error in errors] == ["submit", "synchronize", "barrier"]
            for error in errors:
                assert error["kind"] == "AbortedError"
                assert "this process was forked after init(): Perseus stays with" in error["text"]
            assert ranks.note(rank, "child.ended")["status"] == 0
            ranks.note(rank, "passed")
            assert ranks.finish(rank) == 0


@pytest.mark.parametrize("way", ["exit", "collective", "shutdown", "load_data", "pool"])
def test_child_ends_although_a_thread_of_its_parent_was_synchronizing(tmp_path, way):
    if way == "load_data":
        pytest.importorskip("torch")
    with Ranks(tmp_path, ["fork_while_synchronizing", way], 2) as ranks:
        assert ranks.note(0, "child.ended")["status"] == 7
        for rank in range(2):
            ranks.note(rank, "passed")
            assert ranks.finish(rank) == 0
        errors = [note for note in ranks.notes(0) if note["event"] == "child"]
        assert len(errors) == (way == "collective")
        for error in errors:
            assert error["kind"] == "AbortedError"
            assert "this process was forked after init(): Perseus stays with" in error["text"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_death_is_noticed_although_loader_workers_live_on(tmp_path, transport):
    pytest.importorskip("torch")
    with Ranks(tmp_path, ["load_data"], 3, PERSEUS_TRANSPORT=transport) as ranks:
        ranks.all_note("going")
        workers = ranks.note(1, "workers")["pids"]
        assert len(workers) == 2
        # They would end by themselves some seconds after their parent; stopped, they stay.
        for pid in workers:
            leftovers.stop(pid)
        try:
            ranks.signal(1, signal.SIGKILL)
            for survivor in (0, 2):
                assert "lost rank 1: " in ranks.note(survivor, "error")["text"]
            assert all(Path("/proc", str(pid)).exists() for pid in workers)
        finally:
            for pid in workers:
                leftovers.kill(pid)
        for rank in range(3):
            ranks.finish(rank)
