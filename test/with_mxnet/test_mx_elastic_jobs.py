"""Elastic jobs of perseusrun with MXNet: a rank is killed and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mxnet")

from ranks.elastic import assert_rank_1_was_replaced, run_elastic

RANK = Path(__file__).with_name("elastic_rank.py")


@pytest.mark.parametrize("codec", ["none", "int8", "rotate"])
def test_a_killed_rank_is_replaced(tmp_path: Path, codec: str) -> None:
    job = run_elastic(RANK, tmp_path, codec)
    assert_rank_1_was_replaced(job, 3)
    steps, updates, holds, _ = job.end.split()
    assert steps == updates  # the optimizer's own count goes back, and along, with the state
    assert holds == str(codec == "int8")
