"""Two hosts with a link that takes 100 ms and loses every twentieth packet, as between continents:
ranks meet, agree and compute the right bits, nobody is taken for dead, and who dies is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from poor_link import poor_link

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
if not os.path.exists("/dev/net/tun"):
    pytest.skip("links that lose packets need tunnels: modprobe tun", allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]
_SECRET = "fedcba9876543210" * 2
_DELAY, _LOSS = 0.1, 0.05
_STEPS = 6

_STORE = f"""
import sys
from perseus._core import StoreServer
server = StoreServer("10.78.0.1", 0, False, b"{_SECRET}")
print(server.port, flush=True)
sys.stdin.read()
"""

# Tells of every step whether each sum is right. Then rank 1 dies in the middle of the next one, but
# only when told to: at once, what it sent last could be lost with it.
_RANK = f"""
import json, os, signal, sys, time
import numpy as np
import perseus.arrays as hvd
hvd.init()
rank, sizes = hvd.rank(), (1, 700, 2500)
def given(step, who, size):
    return (np.arange(size) % 97 + 1) * (who + 1) + step
for step in range({_STEPS}):
    sums = [hvd.allreduce(given(step, rank, size), f"t{{size}}", op=hvd.Sum) for size in sizes]
    right = [bool((found == given(step, 0, size) + given(step, 1, size)).all())
             for found, size in zip(sums, sizes)]
    print(json.dumps(right), flush=True)
if rank == 1:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
begun = time.monotonic()
try:
    hvd.allreduce(given(0, rank, 1), "t1", op=hvd.Sum)
except Exception as error:
    print(json.dumps([str(error), time.monotonic() - begun]), flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Hosts with such a link between them."""
    with VirtualHosts(2, ssh=False) as made, poor_link(made, _DELAY, _LOSS):
        yield made


def started(hosts: VirtualHosts, host: int, code: str, **environment: str) -> subprocess.Popen[str]:
    variables = {**hosts.environment(), "PYTHONPATH": str(_ROOT), **environment}
    return hosts.popen(
        host,
        [sys.executable, "-c", code],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_compute_the_right_bits_and_name_who_dies(hosts: VirtualHosts) -> None:
    store = started(hosts, 0, _STORE)
    port = store.stdout.readline().strip()
    ranks = [
        started(
            hosts,
            rank,
            _RANK,
            PERSEUS_RANK=str(rank),
            PERSEUS_SIZE="2",
            PERSEUS_RENDEZVOUS_ADDR="10.78.0.1",
            PERSEUS_RENDEZVOUS_PORT=port,
            PERSEUS_SECRET=_SECRET,
            PERSEUS_GLOO_NETWORK_INTERFACE="poor0",
            GLOO_TIMEOUT_SECONDS="5",
        )
        for rank in range(2)
    ]
    steps = [ranks[0].stdout.readline() for _ in range(_STEPS)]
    said = [rank.communicate(timeout=120) for rank in reversed(ranks)]
    store.communicate(timeout=60)
    right = [json.dumps([True] * 3)] * _STEPS
    assert said[0][0].splitlines() == right, said
    assert [step.strip() for step in steps] == right, said
    text, seconds = json.loads(said[1][0])
    assert "lost rank 1: " in text
    assert seconds < 7.0
    assert ranks[0].returncode == 0
