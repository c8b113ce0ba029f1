"""What goes between two virtual hosts of two ranks each, by mode, threshold, dtype and codec."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytest.importorskip("torch")

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

RUN_CHECKS = Path(__file__).resolve().parents[1] / "parallel" / "run_checks.py"
sys.path[:0] = [str(RUN_CHECKS.parent), str(RUN_CHECKS.parent / "checks")]
from run_checks import checks_of

MODULE = "traffic_checks"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of the checks on each rank."""
    folder = tmp_path_factory.mktemp("traffic")
    command = [sys.executable, "-m", "perseus.run", "-np", "4", "-H", "host0:2,host1:2"]
    with VirtualHosts(2) as hosts:
        env = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
        command += [sys.executable, str(RUN_CHECKS), str(folder), MODULE]
        run = hosts.run(0, command, env=env, timeout=400)
    files = [folder / f"{MODULE}-{rank}.json" for rank in range(4)]
    assert all(file.exists() for file in files), run.stdout + run.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("check", checks_of(importlib.import_module(MODULE)))
def test_on_hosts(results: list[dict[str, str]], check: str) -> None:
    for rank, outcomes in enumerate(results):
        assert outcomes.get(check, "not run") == "", f"on rank {rank}:\n{outcomes.get(check)}"
