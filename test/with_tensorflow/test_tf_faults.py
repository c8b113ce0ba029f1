"""Training with TensorFlow goes on, or ends in time with the rank named, whatever happens to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))

import declared_faults


@pytest.mark.parametrize("case", declared_faults.cases("tensorflow", ["memory (1, 3), shm"]))
def test_a_fault(case: declared_faults.Case, tmp_path: Path) -> None:
    declared_faults.run(case, tmp_path)
