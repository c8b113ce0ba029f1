"""A rank that is alive but late is waited for and named; only a setting ends that."""

from __future__ import annotations

import os
import re

import pytest
from live_ranks import Ranks

CLOCKS = {"GLOO_TIMEOUT_SECONDS": "4", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_late_ranks_are_named_and_waited_for(tmp_path, transport):
    # Rank 1 sleeps, rank 2 is inside a C function that keeps the GIL, both far beyond the limit.
    roles = ["wait", "sleep:8", "hold:8"]
    with Ranks(tmp_path, ["be_late", *roles], 3, PERSEUS_TRANSPORT=transport, **CLOCKS) as ranks:
        after = [ranks.note(rank, "result")["after"] for rank in range(3)]
        assert min(after) > 6
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        said = ranks.output(0)
        assert "One or more tensors were submitted to be reduced, gathered or broadcasted" in said
        assert re.search(r"^1: \[.*late\.gradient.*\]$", said, re.MULTILINE), said
        assert re.search(r"^2: \[.*late\.gradient.*\]$", said, re.MULTILINE), said
        # Every two seconds of waiting again, not more often; by one of those that wait.
        assert 1 <= said.count("One or more tensors") <= after[0] // 2
        assert "One or more tensors" not in ranks.output(1) + ranks.output(2)


def test_warnings_can_be_turned_off(tmp_path):
    roles = ["wait", "sleep:4"]
    environment = CLOCKS | {"HOROVOD_STALL_CHECK_DISABLE": "1"}
    with Ranks(tmp_path, ["be_late", *roles], 2, **environment) as ranks:
        ranks.all_note("result")
        assert [ranks.finish(rank) for rank in range(2)] == [0, 0]
        assert ranks.output(0) + ranks.output(1) == ""


def test_stall_ends_the_job_where_that_is_wanted(tmp_path):
    environment = CLOCKS | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    with Ranks(
        tmp_path, ["wait", "synchronize", "sleep", "synchronize"], 3, **environment
    ) as ranks:
        going = ranks.note(0, "going")["at"]
        for rank in range(3):
            error = ranks.note(rank, "error")
            assert "Will shutdown" in error["text"]
            assert re.search(r"^1: \[.*lonely!.*\]$", error["text"], re.MULTILINE), error["text"]
            assert error["at"] - going > 2
            assert ranks.finish(rank) == 0


def test_warning_that_nobody_reads_holds_up_no_heartbeat_and_is_not_lost(tmp_path):
    errors = tmp_path / "errors"
    os.mkfifo(errors)
    reader = os.open(errors, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with Ranks(tmp_path, ["warn_nobody"], 2, start=False, **CLOCKS) as ranks:
            ranks.start(0, ["sh", "-c", f'exec "$@" 2>"{errors}"', "sh"])
            ranks.start(1)
            ranks.all_note("passed")
            os.set_blocking(reader, True)
            said = b"".join(iter(lambda: os.read(reader, 1 << 16), b"")).decode()
            assert [ranks.finish(rank) for rank in range(2)] == [0, 0]
            assert "One or more tensors were submitted" in said.lstrip(".")[:200]
            assert said.count("One or more tensors") == said.count("\nMissing ranks:\n1: [") > 0
            assert said.endswith("\n")
    finally:
        os.close(reader)
