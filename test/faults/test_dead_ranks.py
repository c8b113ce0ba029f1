"""A rank dies or is stopped: every survivor gets an error that names it, soon; nothing is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from live_ranks import Ranks

LIMIT = 3  # GLOO_TIMEOUT_SECONDS
HEARTBEATS = 2.0  # signs of life and looks for them come in steps

FAULTS = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")]
TRANSPORTS = ["shm", "tcp"]


def expect_error_in_time(ranks: Ranks, survivor: int, victim: int, fault: int, at: float) -> None:
    error = ranks.note(survivor, "error")
    if fault == signal.SIGKILL:
        # Aborted: another survivor was first to see it, or the operation came afterwards.
        assert error["kind"] in ("TransportError", "AbortedError")
        assert f"lost rank {victim}: " in error["text"], "not by the clock"
        assert error["at"] >= at
    else:
        assert error["kind"] in ("DeadlineError", "AbortedError")
        assert f"rank {victim} for " in error["text"]
        assert error["at"] - at > LIMIT - HEARTBEATS
    others = [str(rank) for rank in range(ranks.size) if rank != victim]
    assert not any(f"rank {other}" in error["text"] for other in others), error["text"]


def end_all(ranks: Ranks, victim: int, fault: int) -> None:
    for rank in range(ranks.size):
        if rank != victim:
            assert ranks.finish(rank) == 0
    if fault == signal.SIGSTOP:
        # Continued, it finds that the world went on without it.
        ranks.signal(victim, signal.SIGCONT)
        assert ranks.note(victim, "error")["text"]
        assert ranks.finish(victim) == 0
    else:
        assert ranks.finish(victim) == -signal.SIGKILL


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_in_the_middle_of_big_allreduces(tmp_path, fault, transport):
    victim = 1
    with Ranks(
        tmp_path, ["exchange"], 3, PERSEUS_TRANSPORT=transport, GLOO_TIMEOUT_SECONDS=str(LIMIT)
    ) as ranks:
        ranks.all_note("going")
        at = ranks.signal(victim, fault)
        for survivor in (0, 2):
            expect_error_in_time(ranks, survivor, victim, fault, at)
        end_all(ranks, victim, fault)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_while_the_others_wait_or_compute(tmp_path, fault, transport):
    victim = 0
    roles = ["sleep", "synchronize", "barrier", "compute", "poll"]
    with Ranks(
        tmp_path, ["wait", *roles], 5, PERSEUS_TRANSPORT=transport, GLOO_TIMEOUT_SECONDS=str(LIMIT)
    ) as ranks:
        ranks.all_note("going")
        ranks.wait_until_asleep(1, 2)  # the others compute, or look again and again
        at = ranks.signal(victim, fault)
        for survivor in range(1, 5):
            expect_error_in_time(ranks, survivor, victim, fault, at)
        noticed = ranks.note(3, "noticed")
        assert f"rank {victim}" in noticed["text"]
        end_all(ranks, victim, fault)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_init_before_anything_else(tmp_path, transport):
    with Ranks(
        tmp_path, ["wait", "sleep", "sleep", "sleep"], 3, PERSEUS_TRANSPORT=transport
    ) as ranks:
        ranks.all_note("joined")
        at = ranks.signal(2, signal.SIGKILL)
        for survivor in (0, 1):
            expect_error_in_time(ranks, survivor, 2, signal.SIGKILL, at)
        end_all(ranks, 2, signal.SIGKILL)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_were_suspended_together_go_on(tmp_path, transport):
    # A closed laptop, a frozen container: who did not run cannot tell that others were silent.
    with Ranks(
        tmp_path, ["keep_going"], 3, PERSEUS_TRANSPORT=transport, GLOO_TIMEOUT_SECONDS=str(LIMIT)
    ) as ranks:
        ranks.all_note("going")
        for pause in (LIMIT + 1, LIMIT + 1):
            ranks.signal_all(signal.SIGSTOP)
            time.sleep(pause)  # what is tested: longer than ranks may be silent
            ranks.signal_all(signal.SIGCONT)
            ranks.wait_for_steps(1)
        Path(tmp_path, "enough").touch()
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("transport", "limit"), [("shm", "0"), ("tcp", "60")])
def test_time_for_which_ranks_were_suspended_is_no_stall(tmp_path, transport, limit):
    with Ranks(
        tmp_path,
        ["keep_pending"],
        2,
        PERSEUS_TRANSPORT=transport,
        GLOO_TIMEOUT_SECONDS=limit,
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4",
    ) as ranks:
        ranks.all_note("going")
        ranks.signal_all(signal.SIGSTOP)
        time.sleep(5)  # what is tested: longer than a tensor may be pending
        ranks.signal_all(signal.SIGCONT)
        Path(tmp_path, "enough").touch()
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(2)] == [0, 0]
