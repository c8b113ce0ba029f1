"""An elastic job loses a host that cannot be reached, and goes on within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]
_RANK = str(_ROOT / "test" / "faults" / "soak_rank.py")
_LIMIT = 2  # GLOO_TIMEOUT_SECONDS
_PATIENCE = 60.0


def _lines(directory: Path) -> list[dict[str, Any]]:
    texts = [file.read_text() for file in directory.glob("log.*")]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def _first(directory: Path, word: str, world: int) -> float:
    """When the first rank said that of that world."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        found = [line for line in _lines(directory) if word in line and line["world"] == world]
        if found:
            return min(float(line["at" if word == "step" else word]) for line in found)
        assert time.monotonic() < deadline, _lines(directory)
        time.sleep(0.05)


def test_others_go_on_without_a_host_that_does_not_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perseus.run", "-np", "3", "--min-np", "2"]
    command += ["--blacklist-cooldown-range", "1", "2"]  # else it waits for 8 s
    command += ["-H", "host0:1,host1:1,host2:1", sys.executable, _RANK, str(tmp_path), "1000000"]
    with VirtualHosts(3) as hosts:
        environment = {
            **hosts.environment(),
            "PYTHONPATH": str(_ROOT),
            "GLOO_TIMEOUT_SECONDS": str(_LIMIT),
            "PERSEUS_FLIGHT_RECORDER": "off",
        }
        job = hosts.popen(
            0, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        _first(tmp_path, "step", 1)
        hosts.set_link(2, False)
        assert _first(tmp_path, "step", 2) - _first(tmp_path, "noticed", 1) < 10
        hosts.set_link(2, True)
        (tmp_path / "stop").touch()
        output, _ = job.communicate(timeout=_PATIENCE)
        assert job.returncode == 0, output
        assert "host2: no answer for 0.75 s while others wait for the next world" in output
        deadline = time.monotonic() + _PATIENCE
        while any(_RANK in line for line in hosts.command_lines(2)):
            assert time.monotonic() < deadline, "a rank is left on the host that was lost"
            time.sleep(0.2)
