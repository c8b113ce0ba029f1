"""Starts real ranks with TensorFlow, as test/parallel does with PyTorch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

PARALLEL = Path(__file__).resolve().parents[1] / "parallel"
sys.path.insert(0, str(PARALLEL))
# By path: both folders' modules are called conftest.
_specification = importlib.util.spec_from_file_location("parallel_ranks", PARALLEL / "conftest.py")
assert _specification is not None
assert _specification.loader is not None
_ranks = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(_ranks)

outcome_of = _ranks.outcome_of
run_ranks = _ranks.run_ranks

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
