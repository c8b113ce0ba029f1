"""Starts real ranks with TensorFlow, as test/parallel does with PyTorch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def launch_checks() -> Callable[..., Any]:
    """launch_checks(modules, ranks, directory) -> Launch, in the environment as it is then."""
    launch: Callable[..., Any] = _ranks.Launch
    return launch


os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
