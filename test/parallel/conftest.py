"""The fixtures of test/ranks, for checks with PyTorch."""

from __future__ import annotations

from ranks.fixtures import _run_ranks, expect_check, pytest_collection_modifyitems

__all__ = ["_run_ranks", "expect_check", "pytest_collection_modifyitems"]
