"""The examples for TensorFlow on 2 real ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_keras_learns_digits(run_ranks):
    example = EXAMPLES / "tensorflow_keras_mnist.py"
    status, output = run_ranks(2, [sys.executable, str(example), "--epochs", "10"])
    assert status == 0, output
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= 0.97
