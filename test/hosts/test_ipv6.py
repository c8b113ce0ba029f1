"""Hosts that have no IPv4 addresses but loopback: launchers, ranks and benchmarks reach them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]
_ALLREDUCE = """
import torch
import perseus.torch as hvd
hvd.init()
total = hvd.allreduce(torch.arange(5.0) + 10.0 ** hvd.rank(), op=hvd.Sum)
print(hvd.rank(), hvd.cross_rank(), total.tolist())
"""
_TOTAL = [11.0 + 2 * i for i in range(5)]
_DDP = """
import perseus
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.arange(5.0) + 10.0 ** dist.get_rank()
dist.all_reduce(total)
print(dist.get_rank(), dist.get_backend(), total.tolist())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2, ipv6=True) as made:
        yield made


def environment(hosts: VirtualHosts) -> dict[str, str]:
    return {**hosts.environment(), "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}


def run(hosts: VirtualHosts, *arguments: str) -> str:
    """Run a module on host0, and return what it prints."""
    result = hosts.run(0, [sys.executable, "-m", *arguments], env=environment(hosts), timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("names", ["host0,host1", "[fd77::1]:1,[fd77::2]:1"])
def test_perseusrun_starts_ranks_that_meet(hosts: VirtualHosts, names: str) -> None:
    printed = run(hosts, "perseus.run", "-np", "2", "-H", names, sys.executable, "-c", _ALLREDUCE)
    assert sorted(printed.splitlines()) == [
        f"[{rank}]<stdout>:{rank} {rank} {_TOTAL}" for rank in range(2)
    ]


@pytest.mark.parametrize("master", ["host0", "fd77::1"])
def test_ranks_that_a_script_starts_meet_at_their_master(hosts: VirtualHosts, master: str) -> None:
    ranks = [
        hosts.popen(
            rank,
            [sys.executable, "-c", _DDP],
            env={
                **environment(hosts),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": master,
                "MASTER_PORT": "29500",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert printed == f"{rank} perseus {_TOTAL}\n"


def test_a_benchmark_compares_with_its_peers(hosts: VirtualHosts) -> None:
    printed = run(
        hosts, "perseus.bench", "network", "-np", "2", "-H", "host0,host1", "--sizes", "64K"
    )
    for contender in ("perseus", "raw-tcp", "torch-gloo"):
        (line,) = (line for line in printed.splitlines() if contender in line.split())
        assert line.split()[-1] == "right", printed
