"""New ranks of an elastic job that a survivor feeds over a slow link, and faults in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytest.importorskip("torch")
RANK = Path(__file__).with_name("fed_rank.py")
TABLE = 8 << 20  # bytes of what is frozen
BLOCKS = TABLE >> 14


def lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "kill survivor",
        pytest.param("kill new", marks=pytest.mark.full),
        pytest.param("stop survivor", marks=pytest.mark.full),
        pytest.param("stop new", marks=pytest.mark.full),
    ],
)
def test_new_ranks_are_fed_while_others_train(tmp_path: Path, what: str) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with VirtualHosts(3, rate="50mbit") as hosts:
        command = [
            sys.executable,
            "-m",
            "perseus.run",
            "-H",
            ",".join(f"{n}:1" for n in hosts.names),
        ]
        command += ["-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "1", "1"]
        command += [sys.executable, str(RANK), str(tmp_path), what]
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PERSEUS_", "HVD_"))}
        variables |= hosts.environment()
        variables |= {"GLOO_TIMEOUT_SECONDS": "2", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        job = hosts.popen(
            0, command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = job.communicate(timeout=120)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30)
        for host in range(3):
            assert not [line for line in hosts.command_lines(host) if str(RANK) in line]
    assert job.returncode == 0, output
    ends = lines(tmp_path / "ends")
    assert len(ends) == 3
    assert len({(end["step"], end["digest"]) for end in ends}) == 1, ends
    syncs = lines(tmp_path / "syncs")
    worlds = [[each for each in syncs if each["world"] == n] for n in {s["world"] for s in syncs}]
    for world in worlds:
        assert len({each["digest"] for each in world}) == 1, world
    last = max(worlds, key=lambda world: world[0]["world"])
    if what == "nothing":
        assert {each["fed"] for each in last} == {True}
        # Not a row of the table had to be sent, nor more than once anything else.
        assert max(each["blocks"] for each in last) == BLOCKS
        assert {each["sent"] for each in last} == {sum((64, 1)) * 4 * 2}, last
        assert {each["new"] for each in lines(tmp_path / "feeds")} == {False, True}
    else:
        assert (tmp_path / "done").exists(), "it has not happened"
