"""What holds for every Python test."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs that fail on purpose leave their flight recorders among the tests' own files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
