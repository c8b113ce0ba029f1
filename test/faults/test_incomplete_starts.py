"""Ranks that do not appear, or die while the world forms: the others say which, in time."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from live_ranks import Ranks

LIMIT = 3  # HOROVOD_START_TIMEOUT


def expect_init_error(ranks: Ranks, rank: int, *fragments: str) -> None:
    error = ranks.note(rank, "error")
    assert error["kind"] == "InitializationError"
    assert len(error["text"].splitlines()) == 1
    for fragment in fragments:
        assert fragment in error["text"]
    assert error["at"] - ranks.note(rank, "joining")["at"] > LIMIT - 0.5
    assert ranks.finish(rank) == 0


def test_ranks_that_never_come_are_named(tmp_path):
    with Ranks(tmp_path, ["start"], 4, start=False, HOROVOD_START_TIMEOUT=str(LIMIT)) as ranks:
        ranks.start_together(0, 2)
        for rank in (0, 2):
            expect_init_error(
                ranks, rank, "rank 1, 3 of 4 did not appear within 3 s (HOROVOD_START_TIMEOUT)"
            )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rank_that_dies_while_others_are_still_missing_is_named(tmp_path, transport):
    with Ranks(
        tmp_path,
        ["start"],
        3,
        start=False,
        HOROVOD_START_TIMEOUT=str(LIMIT),
        PERSEUS_TRANSPORT=transport,
    ) as ranks:
        ranks.start(1)
        ranks.note(1, "joining")
        ranks.wait_until_asleep(1)  # it has said that it is there, and waits for the others
        ranks.signal(1, signal.SIGKILL)
        ranks.start_together(0, 2)
        for rank in (0, 2):
            expect_init_error(ranks, rank, "rank 1")
        ranks.finish(1)


def test_late_rank_is_waited_for_until_the_limit(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False, HOROVOD_START_TIMEOUT="20") as ranks:
        ranks.start(2)
        ranks.start(0)
        for rank in (0, 2):
            ranks.note(rank, "joining")
        ranks.wait_until_asleep(0, 2)
        ranks.start(1)
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rank_killed_at_any_moment_of_the_start_is_named(tmp_path, transport):
    scenario = ["wait", "barrier", "sleep", "synchronize"]
    environment = {"HOROVOD_START_TIMEOUT": "2", "PERSEUS_TRANSPORT": transport}
    with contextlib.ExitStack() as stack:
        worlds = []
        for moment in range(5):
            directory = tmp_path / str(moment)
            directory.mkdir()
            ranks = stack.enter_context(Ranks(directory, scenario, 3, start=False, **environment))
            ranks.start_together(0, 1, 2)
            ranks.note(1, "joining")
            time.sleep(0.025 * moment)  # what is tested: wherever the start has got to by then
            ranks.signal(1, signal.SIGKILL)
            worlds.append(ranks)
        for ranks in worlds:
            for rank in (0, 2):
                error = ranks.note(rank, "error")
                assert "rank 1" in error["text"], error["text"]
                assert ranks.finish(rank) == 0
            ranks.finish(1)
