"""What ranks have agreed on is finished after another one has left, however long it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]

# The sum takes 3 s or more: much longer than a connection that is closed may go unexplained.
_RANK = """
import time
import numpy as np
import perseus.arrays as hvd
from perseus.process_sets import ProcessSet
pair = ProcessSet([0, 1])
hvd.init(process_sets=[pair])
given = [(np.arange(8_000_000) % 97 + rank).astype(np.float32) for rank in range(2)]
hvd.allreduce(np.zeros(1), "all are here")
if hvd.rank() == 2:
    time.sleep(1)  # until the others have agreed
else:
    expected = given[0] + given[1]
    found = hvd.allreduce(given[hvd.rank()], "sum", op=hvd.Sum, process_set=pair)
    print("right" if (found == expected).all() else "wrong", flush=True)
hvd.shutdown()
"""


def test_a_sum_goes_on_without_a_rank_that_has_no_part_in_it() -> None:
    with VirtualHosts(3, rate="100mbit", ssh=True) as hosts:
        where = ",".join(f"{name}:1" for name in hosts.names)
        job = hosts.popen(
            0,
            [
                sys.executable,
                "-m",
                "perseus.run",
                "-H",
                where,
                "-np",
                "3",
                sys.executable,
                "-c",
                _RANK,
            ],
            env={**hosts.environment(), "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert said.count("right") == 2, said
