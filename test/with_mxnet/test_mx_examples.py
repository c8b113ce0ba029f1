"""The examples for MXNet as scripts on 2 real ranks; mx_example_checks.py has short runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.full
def test_a_trainer_learns(run_ranks):
    status, output = run_ranks(2, [sys.executable, str(EXAMPLES / "mxnet_mnist.py")], timeout=300)
    assert status == 0, output
    (accuracy,) = re.findall(r"test accuracy: (\d\.\d+)", output)  # rank 0 alone
    assert float(accuracy) >= 0.97
