"""What holds for every Python test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launchers import _no_segments_left
from slow_tests import is_slow

__all__ = ["_no_segments_left"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests of a file share fixtures, checks of so many ranks a launch: one process runs them.

    Those that take long are marked, so that others can be run alone.
    """
    for item in items:
        group = item.path.stem
        if "expect_check" in item.fixturenames:
            group = f"{item.callspec.params['ranks']} ranks"
        item.add_marker(pytest.mark.xdist_group(group))
        if is_slow(item):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Background jobs ignore Ctrl-C and nohup hang-ups, their children too: tests send both."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs that fail on purpose leave their flight recorders among the tests' own files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture
def quickly(tmp_path: Path) -> Callable[[float, Callable[[Path], float]], None]:
    """quickly(limit, attempt): one of up to ten attempts takes less than `limit` seconds.

    For what would otherwise wait for a clock: that fails every time, a busy machine now and then.
    attempt(directory) returns how long it took.
    """

    def check(limit: float, attempt: Callable[[Path], float]) -> None:
        times: list[float] = []
        while not times or times[-1] >= limit:
            assert len(times) < 10, f"took {times} s, expected less than {limit} s"
            directory = tmp_path / f"attempt{len(times)}"
            directory.mkdir()
            times.append(attempt(directory))

    return check
