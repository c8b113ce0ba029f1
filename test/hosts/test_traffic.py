"""What goes between two virtual hosts of two ranks each, by mode, threshold, dtype and codec."""

from __future__ import annotations

import sys

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytest.importorskip("torch")

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from ranks.launch import Launch, checks_of

MODULE = "traffic_checks"


@pytest.fixture(scope="module")
def launched() -> Launch:
    """The run of the checks, two ranks on each host."""
    start = [sys.executable, "-m", "perseus.run", "-np", "4", "-H", "host0:2,host1:2"]

    def run(command: list[str]) -> tuple[int, str]:
        with VirtualHosts(2) as hosts:
            env = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
            done = hosts.run(0, [*start, *command], env=env, timeout=400)
        return done.returncode, done.stdout + done.stderr

    return Launch({MODULE: checks_of(MODULE)}, 4, run)


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_hosts(launched: Launch, check: str) -> None:
    launched.expect(MODULE, check)
