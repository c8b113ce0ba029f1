"""Ctrl-C while ranks wait: everything ends without waiting for a clock, quietly, and leaves nothing
behind."""

from __future__ import annotations

import signal

import pytest
from live_ranks import NO_CLOCKS, PATIENT_PERSEUSRUN, Launch, Ranks

# What ranks do when it comes, and which of them sleep in a wait then. In each, all ranks note
# "going" before.
SCENES = [
    pytest.param(["wait", "synchronize", "sleep"], [0], False, id="synchronize"),
    pytest.param(["wait", "barrier", "compute"], [0], False, id="barrier"),
    pytest.param(["exchange"], [], False, id="allreduce"),
    pytest.param(["wait", "synchronize", "sleep"], [0], True, id="terminal"),
    pytest.param(["exchange"], [], True, id="terminal-allreduce"),
]


@pytest.mark.parametrize(("scenario", "asleep", "terminal"), SCENES)
def test_ctrl_c_ends_perseusrun_and_its_ranks(tmp_path, scenario, asleep, terminal):
    with Launch(
        tmp_path,
        scenario,
        2,
        perseusrun=PATIENT_PERSEUSRUN,
        terminal=terminal,
        environment=NO_CLOCKS,
    ) as launch:
        launch.note(0, "going")
        launch.note(1, "going")
        launch.wait_until_asleep(*asleep)
        if terminal:
            launch.type(b"\x03")
        else:
            launch.signal(signal.SIGINT)
        assert launch.finish() == 128 + signal.SIGINT
        assert "Traceback" not in launch.output + launch.errors


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("scenario", "asleep"),
    [(["wait", "synchronize", "barrier"], [0, 1]), (["exchange"], [])],
    ids=["wait", "exchange"],
)
def test_interrupt_sent_to_every_rank_is_a_keyboard_interrupt(
    tmp_path, scenario, asleep, transport
):
    with Ranks(tmp_path, scenario, 2, PERSEUS_TRANSPORT=transport, **NO_CLOCKS) as ranks:
        ranks.all_note("going")
        ranks.wait_until_asleep(*asleep)
        ranks.signal_all(signal.SIGINT)
        statuses = [ranks.finish(rank) for rank in range(2)]
        # One may learn of the other's end before Python comes to look at its own signal, or before
        # the signal is sent.
        assert -signal.SIGINT in statuses
        for rank in range(2):
            assert "KeyboardInterrupt" in ranks.output(rank) or ranks.find(rank, "error")


def test_interrupted_rank_ends_the_wait_of_the_others(tmp_path):
    with Ranks(tmp_path, ["wait", "synchronize", "sleep", "barrier"], 3) as ranks:
        ranks.all_note("going")
        ranks.signal(1, signal.SIGINT)
        assert ranks.finish(1) == -signal.SIGINT
        for rank in (0, 2):
            assert "Horovod has been shut down" in ranks.note(rank, "error")["text"]
            assert ranks.finish(rank) == 0


def test_interrupt_during_init_ends_it(tmp_path):
    with Ranks(tmp_path, ["start"], 2, start=False, **NO_CLOCKS) as ranks:
        ranks.start(0)
        ranks.note(0, "joining")
        ranks.wait_until_asleep(0)
        ranks.signal(0, signal.SIGINT)
        assert ranks.finish(0) == -signal.SIGINT
        assert [note["event"] for note in ranks.notes(0)] == ["ready", "joining", "interrupted"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_interrupt_while_connecting_ends_init(tmp_path, transport):
    # Rank 1 has said that it is there and is gone: rank 0 waits for it where ranks connect.
    with Ranks(
        tmp_path, ["start"], 3, start=False, PERSEUS_TRANSPORT=transport, **NO_CLOCKS
    ) as ranks:
        ranks.start(1)
        ranks.note(1, "joining")
        ranks.wait_until_asleep(1)
        ranks.signal(1, signal.SIGKILL)
        ranks.finish(1)
        ranks.start_together(0, 2)
        ranks.note(0, "joining")
        ranks.note(2, "joining")
        ranks.wait_until_asleep(0, 2)
        ranks.signal_all(signal.SIGINT)
        for rank in (0, 2):
            status = ranks.finish(rank)
            assert status == -signal.SIGINT or ranks.find(rank, "error")
        assert ranks.find(0, "interrupted") or ranks.find(2, "interrupted")
