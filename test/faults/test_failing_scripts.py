"""One rank's script fails or ends early: the others end too, soon, and it is clear who began."""

from __future__ import annotations

import re
import signal

import pytest
from live_ranks import Launch, Ranks

GOODBYE = "Horovod has been shut down: rank {} called shutdown() or ended."


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", "1", "KeyError: 'no such column'"),
        ("exit", "3", ""),
        ("kill", f"{128 + signal.SIGKILL} (SIGKILL)", ""),
    ],
)
def test_first_failing_rank_is_named_and_the_rest_ended(tmp_path, how, code, words):
    environment = {"FAULTS_RAISE": "1"}
    with Launch(tmp_path, ["fail_alone", how], 3, environment=environment) as launch:
        launch.note(2, "failing")
        assert launch.finish() == int(code.split()[0])
        errors = launch.errors.splitlines()
        assert errors[-1].endswith(
            f"rank 2 on localhost was the first to fail, with exit code {code}"
        )
        assert words in launch.errors
        if words:
            assert sum(words in line for line in errors) == 1
            assert "[2]<stderr>:" + words in launch.errors


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", GOODBYE.format(2)),
        ("exit", GOODBYE.format(2)),
        ("return", GOODBYE.format(2)),
        ("shutdown", GOODBYE.format(2)),
        ("_exit", "lost rank 2: "),
    ],
)
def test_others_get_an_error_when_a_rank_ends_early(tmp_path, how, text, transport):
    environment = {"PERSEUS_TRANSPORT": transport, "FAULTS_RAISE": "1"}
    with Ranks(tmp_path, ["fail_alone", how], 3, **environment) as ranks:
        ranks.note(2, "failing")
        for rank in (0, 1):
            assert text in ranks.note(rank, "error")["text"]
            assert ranks.finish(rank) == 1
        if how == "shutdown":
            ranks.signal(2, signal.SIGTERM)
        status = {"raise": 1, "exit": 3, "shutdown": -signal.SIGTERM}.get(how, 0)
        assert ranks.finish(2) == status


def test_early_exit_with_status_zero_is_still_a_failed_job(tmp_path):
    environment = {"FAULTS_RAISE": "1"}
    with Launch(tmp_path, ["fail_alone", "_exit"], 2, environment=environment) as launch:
        assert launch.finish() == 1
        assert "lost rank 1: " in launch.errors
        assert re.search(
            "rank 0 on localhost was the first to fail, with exit code 1; rank 1 on localhost had "
            "left .* s earlier, with exit code 0\n",
            launch.errors,
        )


def test_ranks_may_leave_as_soon_as_their_own_part_is_done(tmp_path):
    with Ranks(tmp_path, ["leave", "done"], 3) as ranks:
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        ranks.all_note("passed")


def test_rank_that_leaves_without_waiting_ends_the_others_wait_either_way(tmp_path):
    with Ranks(tmp_path, ["leave", "unfinished"], 3) as ranks:
        assert ranks.finish(0) == 0
        for rank in (1, 2):
            assert ranks.finish(rank) == 0
            last = ranks.notes(rank)[-1]
            assert last["event"] == "passed" or GOODBYE.format(0) in last["text"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["shutdown", "stall"])
def test_all_ranks_can_make_a_new_world_when_one_has_ended(tmp_path, how, transport):
    environment = {"PERSEUS_TRANSPORT": transport, "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    if how == "stall":
        # More than ranks on a busy machine are apart by when they submit what they all submit.
        environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "4"
    with Ranks(tmp_path, ["begin_again", how], 3, **environment) as ranks:
        ranks.all_note("passed")
        for rank in range(3):
            ended = [note["text"] for note in ranks.notes(rank) if note["event"] == "ended"]
            assert len(ended) == (0 if rank == 1 and how == "shutdown" else 2)
            assert all(("Will shutdown" in text) == (how == "stall") for text in ended)
            assert ranks.finish(rank) == 0
