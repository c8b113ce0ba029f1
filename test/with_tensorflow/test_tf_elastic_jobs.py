"""Elastic jobs of perseusrun with TensorFlow: a rank is killed and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ranks.elastic import assert_rank_1_was_replaced, run_elastic

RANK = Path(__file__).with_name("elastic_rank.py")


def test_a_killed_rank_is_replaced(tmp_path):
    assert_rank_1_was_replaced(run_elastic(RANK, tmp_path), 3)
