"""How ranks of other hosts learn that one has left, and what they finish nevertheless."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]

# The sum takes 3 s or more: much longer than a connection that is closed may go unexplained.
_PAIR = """
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


# Rank 1 learns that rank 0 has left from the answer to what it asks next.
_LEAVER = """
import sys
import time
from pathlib import Path
import numpy as np
import perseus.arrays as hvd
hvd.init()
hvd.allreduce(np.zeros(1), "all are here")
if hvd.rank() == 0:
    print("may leave", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
else:
    try:
        hvd.allreduce(np.zeros(1), "alone")
    except hvd.HorovodInternalError as error:
        print(error, flush=True)
hvd.shutdown()
"""


def _start(hosts: VirtualHosts, script: str, *arguments: object) -> subprocess.Popen[str]:
    where = ",".join(f"{name}:1" for name in hosts.names)
    command = [sys.executable, "-m", "perseus.run", "-H", where, "-np", str(len(hosts.names))]
    return hosts.popen(
        0,
        [*command, sys.executable, "-c", script, *map(str, arguments)],
        env={**hosts.environment(), "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_sum_goes_on_without_a_rank_that_has_no_part_in_it() -> None:
    with VirtualHosts(3, rate="100mbit", ssh=True) as hosts:
        job = _start(hosts, _PAIR)
        said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert said.count("right") == 2, said


def test_a_goodbye_that_is_lost_on_its_way_is_said_again(tmp_path: Path) -> None:
    with VirtualHosts(2, ssh=True) as hosts:
        job = _start(hosts, _LEAVER, tmp_path / "go")
        assert job.stdout is not None
        assert "may leave" in job.stdout.readline()
        rule = ["to", hosts.address(1), "blackhole"]
        assert hosts.run(0, ["ip", "rule", "add", *rule]).returncode == 0
        (tmp_path / "go").touch()
        time.sleep(0.5)
        assert hosts.run(0, ["ip", "rule", "del", *rule]).returncode == 0
        said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert "rank 0 called shutdown() or ended" in said, said
