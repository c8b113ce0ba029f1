"""The examples for TensorFlow as scripts on 2 real ranks; tf_example_checks.py has short runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ESTIMATOR_IS_THERE = hasattr(tf, "estimator")
# Few words, seen often: fewer steps show something.
SOME_WORDS = ["--steps", "600", "--batch-size", "512", "--fewest", "30", "--lr", "3"]


@pytest.mark.parametrize(
    ("example", "arguments", "least"),
    [
        pytest.param("tensorflow_keras_mnist.py", ["--epochs", "10"], 0.97, marks=pytest.mark.full),
        pytest.param("tensorflow2_mnist.py", [], 0.97, marks=pytest.mark.full),
        pytest.param("tensorflow_mnist.py", [], 0.96, marks=pytest.mark.full),
        pytest.param("tensorflow_word2vec.py", SOME_WORDS, 0.57, marks=pytest.mark.full),
        pytest.param(
            "tensorflow_mnist_estimator.py",
            [],
            0.96,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(not ESTIMATOR_IS_THERE, reason="2.15 was the last with it"),
            ],
        ),
    ],
)
def test_scripts_learn(run_ranks, example, arguments, least):
    status, output = run_ranks(
        2, [sys.executable, str(EXAMPLES / example), *arguments], timeout=300
    )
    assert status == 0, output
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= least
