"""Starts real ranks with MXNet, as test/parallel does with PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PARALLEL = Path(__file__).resolve().parents[1] / "parallel"
sys.path.insert(0, str(PARALLEL))
# By path: both folders' modules are called conftest.
_specification = importlib.util.spec_from_file_location("parallel_ranks", PARALLEL / "conftest.py")
assert _specification is not None
assert _specification.loader is not None
_ranks = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(_ranks)

outcome_of = _ranks.outcome_of
pytest_collection_modifyitems = _ranks.pytest_collection_modifyitems


@pytest.fixture
def run_ranks() -> Callable[..., tuple[int, str]]:
    """run_ranks(ranks, command) -> (status, output), see test/parallel/conftest.py."""
    run: Callable[..., tuple[int, str]] = _ranks.run_ranks
    return run
