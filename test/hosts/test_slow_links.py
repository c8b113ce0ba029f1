"""Links so slow that what all streams send together takes longer than GLOO_TIMEOUT_SECONDS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_RANK = """
import array
from perseus import basics
BROADCAST = 2
basics.init()
operations = basics.operations(
    lambda *_: None, lambda v: (v.buffer_info()[0], (len(v),), (1,), 2))
rank = basics.rank()
vectors = [array.array("f", [float(i if rank == 0 else -1)]) * (16 << 20) for i in range(4)]
handles = [
    operations.submit(BROADCAST, str(i), vectors[i], vectors[i], root=0) for i in range(4)]
for i, handle in enumerate(handles):
    operations.synchronize(handle)
    assert vectors[i][0] == vectors[i][-1] == i
print("passed", flush=True)
"""


def test_ranks_that_only_wait_for_the_link_are_not_taken_for_dead(tmp_path: Path) -> None:
    # Of the three ranks of one host, one alone exchanges with the single one of the other.
    program = tmp_path / "rank.py"
    program.write_text(_RANK)
    command = [sys.executable, "-m", "perseus.run", "-np", "4", "-H", "host0:1,host1:3"]
    command += [sys.executable, str(program)]
    settings = {"GLOO_TIMEOUT_SECONDS": "6", "PERSEUS_ALLREDUCE_STREAMS": "4"}
    # 256 MiB take 11 s.
    with VirtualHosts(2, rate="200mbit") as hosts:
        job = hosts.popen(
            0, command, env={**hosts.environment(), **settings}, stdout=-1, stderr=-2, text=True
        )
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert output.count("passed") == 4, output
