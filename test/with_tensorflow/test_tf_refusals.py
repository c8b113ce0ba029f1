"""What one rank's Python refuses ends the others, by an error that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

PROGRAM = str(Path(__file__).resolve().parent / "refusing_rank.py")
WORDS = {
    "eager": "32-bit integer elements",
    "function": "groups should be a positive integer or a list of lists of variables",
    "fit": "backward_passes_per_step must be > 0",
}


EAGER, FIT = (pytest.param(way, marks=pytest.mark.full) for way in ("eager", "fit"))


@pytest.mark.parametrize("way", [EAGER, "function", FIT])
def test_the_launcher_names_the_rank_that_refused(run_ranks, way):
    status, output = run_ranks(2, [sys.executable, PROGRAM, way])
    assert status == 1, output
    assert "rank 1 on localhost was the first to fail, with exit code 1" in output, output
    assert any(WORDS[way] in line for line in output.splitlines() if line.startswith("[1]")), output


@pytest.mark.full
@pytest.mark.parametrize("way", WORDS)
def test_who_waits_is_warned_and_then_ended(run_ranks, tmp_path, way):
    found = tmp_path / "found"
    status, output = run_ranks(
        2, ["env", "HOROVOD_STALL_CHECK_TIME_SECONDS=1", sys.executable, PROGRAM, way, str(found)]
    )
    assert status == 0, output
    told = found.read_text()
    assert "Missing ranks:\n1: [" in told, told
    assert "rank 1 called shutdown() or ended" in told.partition("ended by: ")[2], told
