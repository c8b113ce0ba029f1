"""Elastic training on real ranks: worlds that end are left, and the next one is joined."""

from __future__ import annotations

import re
import sys

import pytest
from ranks.launch import PARALLEL, run_ranks

pytest.importorskip("torch")


def _run(ranks: int, *command: object) -> str:
    status, output = run_ranks(ranks, [sys.executable, *map(str, command)])
    assert status == 0, output
    return output


def _expect_all_finished(ranks: int, *command: object) -> None:
    output = _run(ranks, *command)
    for rank in range(ranks):
        assert f"rank {rank} finished" in output


@pytest.mark.parametrize(("ranks", "failing"), [(1, 0), (2, 0), (2, 1), (3, 1), (4, 2)])
def test_a_failure_on_one_rank_costs_nothing_but_the_way_back_to_the_commit(ranks, failing):
    _expect_all_finished(ranks, PARALLEL / "programs" / "elastic_training.py", failing)


def test_the_elastic_demo_learns_digits_through_a_failure():
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    example = PARALLEL.parent.parent / "examples" / "pytorch_elastic_mnist.py"
    output = _run(2, example, "--epochs", "4", "--fail-at-epoch", "1")
    assert "going on at epoch 1, batch 5" in output
    assert output.count("failing on purpose") == 1
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= 0.85
