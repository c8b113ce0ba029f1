"""What holds for every Python test."""

from __future__ import annotations

import os
import signal

import pytest


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
