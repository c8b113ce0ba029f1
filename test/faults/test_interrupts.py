"""Ctrl-C while ranks wait: everything ends within seconds, quietly, and leaves nothing behind."""

from __future__ import annotations

import signal
import time

import pytest
from live_ranks import Launch, Ranks

SOON = 4.5

# What ranks do when it comes. In each, all ranks note "going" before.
SCENES = [
    pytest.param(["wait", "synchronize", "sleep"], False, id="synchronize"),
    pytest.param(["wait", "barrier", "compute"], False, id="barrier"),
    pytest.param(["exchange"], False, id="allreduce"),
    pytest.param(["wait", "synchronize", "sleep"], True, id="terminal"),
    pytest.param(["exchange"], True, id="terminal-allreduce"),
]


@pytest.mark.parametrize(("scenario", "terminal"), SCENES)
def test_ctrl_c_ends_perseusrun_and_its_ranks(quickly, scenario, terminal):
    def attempt(directory):
        with Launch(directory, scenario, 2, terminal=terminal) as launch:
            launch.note(0, "going")
            launch.note(1, "going")
            time.sleep(0.3)
            at = launch.type(b"\x03") if terminal else launch.signal(signal.SIGINT)
            assert launch.finish() == 128 + signal.SIGINT
            assert "Traceback" not in launch.output + launch.errors
            return launch.ended_at - at

    quickly(SOON, attempt)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "scenario", [["wait", "synchronize", "barrier"], ["exchange"]], ids=lambda s: s[0]
)
def test_interrupt_sent_to_every_rank_is_a_keyboard_interrupt(quickly, scenario, transport):
    def attempt(directory):
        with Ranks(directory, scenario, 2, PERSEUS_TRANSPORT=transport) as ranks:
            ranks.all_note("going")
            time.sleep(0.3)
            at = ranks.signal_all(signal.SIGINT)
            statuses = [ranks.finish(rank) for rank in range(2)]
            took = time.monotonic() - at
            # One may learn of the other's end before Python comes to look at its own signal, or
            # before the signal is sent.
            assert -signal.SIGINT in statuses
            for rank in range(2):
                assert "KeyboardInterrupt" in ranks.output(rank) or ranks.find(rank, "error")
            return took

    quickly(SOON, attempt)


def test_interrupted_rank_ends_the_wait_of_the_others(tmp_path):
    with Ranks(tmp_path, ["wait", "synchronize", "sleep", "barrier"], 3) as ranks:
        ranks.all_note("going")
        ranks.signal(1, signal.SIGINT)
        assert ranks.finish(1) == -signal.SIGINT
        for rank in (0, 2):
            assert "Horovod has been shut down" in ranks.note(rank, "error")["text"]
            assert ranks.finish(rank) == 0


def test_interrupt_during_init_ends_it(quickly):
    def attempt(directory):
        with Ranks(directory, ["start"], 2, start=False) as ranks:
            ranks.start(0)
            ranks.note(0, "joining")
            time.sleep(0.3)
            at = ranks.signal(0, signal.SIGINT)
            assert ranks.finish(0) == -signal.SIGINT
            took = time.monotonic() - at
            assert [note["event"] for note in ranks.notes(0)] == ["ready", "joining", "interrupted"]
            return took

    quickly(SOON, attempt)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_interrupt_while_connecting_ends_init(quickly, transport):
    # Rank 1 has said that it is there and is gone: rank 0 waits for it where ranks connect.
    def attempt(directory):
        with Ranks(directory, ["start"], 3, start=False, PERSEUS_TRANSPORT=transport) as ranks:
            ranks.start(1)
            ranks.note(1, "joining")
            time.sleep(0.5)
            ranks.signal(1, signal.SIGKILL)
            ranks.finish(1)
            ranks.start_together(0, 2)
            ranks.note(0, "joining")
            ranks.note(2, "joining")
            time.sleep(0.7)
            at = ranks.signal_all(signal.SIGINT)
            for rank in (0, 2):
                status = ranks.finish(rank)
                assert status == -signal.SIGINT or ranks.find(rank, "error")
            took = time.monotonic() - at
            assert ranks.find(0, "interrupted") or ranks.find(2, "interrupted")
            return took

    quickly(SOON, attempt)
