"""Processes that run out of descriptors: an error that says so on every rank, or none at all."""

from __future__ import annotations

import pytest
from live_ranks import Ranks

SETTINGS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "GLOO_TIMEOUT_SECONDS": "60"}


@pytest.mark.parametrize(
    ("transport", "what"),
    [("shm", "allreduce"), ("shm", "add_process_set"), ("tcp", "allreduce")],
)
def test_shortage_is_named_on_every_rank(tmp_path, transport, what):
    words = ["run_short", what, "0"]
    with Ranks(tmp_path, words, 3, PERSEUS_TRANSPORT=transport, **SETTINGS) as ranks:
        for rank in range(3):
            text = ranks.note(rank, "error")["text"]
            assert "Too many open files: this process has opened all of the " in text, text
            assert "descriptors that its limit allows" in text
            assert "`ulimit -n`" in text
            assert "memory limit" not in text
            assert ranks.finish(rank) == 0


@pytest.mark.parametrize("what", ["allreduce", "add_process_set"])
@pytest.mark.parametrize("spare", [1, 2])
def test_one_descriptor_is_enough_for_links_inside_a_host(tmp_path, what, spare):
    words = ["run_short", what, str(spare)]
    with Ranks(tmp_path, words, 3, PERSEUS_TRANSPORT="shm", **SETTINGS) as ranks:
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


def test_soft_limit_is_raised_at_the_start(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False, PERSEUS_TRANSPORT="tcp") as ranks:
        for rank in range(3):
            ranks.start(rank, ["prlimit", "--nofile=40:4096"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        assert [ranks.output(rank) for rank in range(3)] == ["", "", ""]
        limits = [ranks.note(rank, "joined")["descriptors"] for rank in range(3)]
        assert all(40 < limit < 4096 for limit in limits), limits


def test_hard_limit_that_is_too_low_is_said_once(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False, PERSEUS_TRANSPORT="tcp") as ranks:
        for rank in range(3):
            ranks.start(rank, ["prlimit", "--nofile=60:60"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        said = "".join(ranks.output(rank) for rank in range(3))
        assert said.count("descriptors are needed, and the hard limit of this process is 60") == 1
