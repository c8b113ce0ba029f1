"""The fixtures of test/ranks, for checks with TensorFlow."""

from __future__ import annotations

import os

from ranks.fixtures import _run_ranks, expect_check, pytest_collection_modifyitems

__all__ = ["_run_ranks", "expect_check", "pytest_collection_modifyitems"]

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
