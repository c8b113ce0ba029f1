"""What holds for every Python test."""

from __future__ import annotations

import os
import signal
import zlib

import pytest
from mpi_launchers import _no_segments_left
from slow_tests import OTHER_HALF, is_slow

__all__ = ["_no_segments_left"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests of a file share fixtures, checks of so many ranks a launch: one process runs them.

    Those that take long are marked, so that others can be run alone. Where two versions of PyTorch
    run a file, they share out its long ones, by name: neither has them all, or in the same order.
    """
    for item in items:
        group = item.path.stem
        if "expect_check" in item.fixturenames:
            group = f"{item.callspec.params['ranks']} ranks"
        item.add_marker(pytest.mark.xdist_group(group))
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
            odd = zlib.crc32(item.nodeid.encode()) % 2 == 1
            if item.get_closest_marker("shared") and odd != OTHER_HALF:
                item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Background jobs ignore Ctrl-C and nohup hang-ups, their children too: tests send both."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _whole_lines() -> None:
    """Ranks that share a pipe write lines whole: unbuffered, print() writes a line in pieces."""
    os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs that fail on purpose leave their flight recorders among the tests' own files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
