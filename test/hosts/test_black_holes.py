"""Connections swallow what they are given while all ranks live and receive each other's heartbeats.

Negotiation notices: no byte of a round moves, and the error names a rank next to the break.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 4  # GLOO_TIMEOUT_SECONDS
_BOUND = _LIMIT + 2.0
_BUSY = 3.0  # what a busy machine may add: the tests run side by side with others
_SECRET = "0123456789abcdef" * 2

_STORE = f"""
import sys
from perseus._core import StoreServer
server = StoreServer("10.77.0.1", 0, False, b"{_SECRET}")
print(server.port, flush=True)
sys.stdin.read()
"""

# Says which ports its connections have but those for heartbeats, waits for a word, and then submits
# something or computes until the world fails.
_RANK = """
import array, json, os, socket, struct, sys, time
from perseus import basics
rank, store = int(os.environ["PERSEUS_RANK"]), int(os.environ["PERSEUS_RENDEZVOUS_PORT"])
basics.init()
operations = basics.operations(
    lambda *_: None, lambda v: (v.buffer_info()[0], (len(v),), (1,), 2))
def connections():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # that of the listing itself
            continue
        try:
            own = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        try:
            peer = own.getpeername()
        except OSError:
            own.close()
            continue
        if own.type != socket.SOCK_STREAM or own.family == socket.AF_UNIX or peer[1] == store:
            continue
        facts = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        idle = struct.unpack_from("I", facts, 52)[0]  # ms ago
        host = int(peer[0].rpartition(".")[2]) - 1
        found.setdefault(host, []).append((idle, own.getsockname()[1], peer[1]))
    assert all(len(idle) > 1 for idle in found.values()), found
    return {host: sorted(idle) for host, idle in found.items()}
# Heartbeats come every second on one connection; those of rounds and data fall silent.
while any(idle[1][0] < 2000 for idle in connections().values()):
    time.sleep(0.05)
print(json.dumps({host: idle[1:] for host, idle in connections().items()}), flush=True)
sys.stdin.readline()
begun, text = time.monotonic(), None
if rank == 0:
    values = array.array("f", [1.0] * 100)
    try:
        operations.synchronize(operations.submit(0, "a", values, values, op=1))
    except Exception as error:
        text = type(error).__name__ + ": " + str(error)
else:
    while (text := basics._context().failure()) is None:
        sum(range(20_000))
print(json.dumps({"text": text, "after": time.monotonic() - begun}), flush=True)
"""


class Case(NamedTuple):
    size: int
    cut: tuple[tuple[int, int], ...]  # (from, to): what these ranks send each other vanishes


_CASES = {
    "both ways": Case(2, ((0, 1), (1, 0))),
    "from the rank that submits": Case(2, ((0, 1),)),
    "to the rank that submits": Case(2, ((1, 0),)),
    "between two that wait for a third": Case(3, ((1, 2),)),
    "one way of three": Case(3, ((0, 1),)),
}


class World:
    """Ranks of one case, one on each host."""

    def __init__(self, hosts: VirtualHosts, case: Case, store: int) -> None:
        self.hosts, self.case = hosts, case
        self.rank = []
        for rank in range(case.size):
            identity = {
                "PYTHONPATH": str(_ROOT),
                "PERSEUS_RANK": str(rank),
                "PERSEUS_SIZE": str(case.size),
                "PERSEUS_RENDEZVOUS_ADDR": hosts.address(0),
                "PERSEUS_RENDEZVOUS_PORT": str(store),
                "PERSEUS_SECRET": _SECRET,
                "GLOO_TIMEOUT_SECONDS": str(_LIMIT),
            }
            self.rank.append(
                hosts.popen(
                    rank,
                    [sys.executable, "-c", _RANK],
                    env={**hosts.environment(), **identity},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def line(self, rank: int) -> dict[str, Any]:
        text = self.rank[rank].stdout.readline()
        assert text, f"rank {rank} of {self.case} ended without a word"
        return json.loads(text)

    def cut(self) -> None:
        ports = [self.line(rank) for rank in range(self.case.size)]
        for source, target in self.case.cut:
            for _, local, remote in ports[source][str(target)]:
                rule = f"ipproto tcp sport {local} dport {remote} blackhole".split()
                made = self.hosts.run(source, ["ip", "rule", "add", *rule])
                assert made.returncode == 0, made.stderr

    def go(self) -> None:
        for process in self.rank:
            process.stdin.write("\n")
            process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        return [self.line(rank) for rank in range(self.case.size)]

    def close(self) -> None:
        for process in self.rank:
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """What each rank of each case says at its end. All worlds wait for the clock together."""
    with VirtualHosts(3, ssh=False) as hosts:
        stores = [
            hosts.popen(
                0,
                [sys.executable, "-c", _STORE],
                env={**hosts.environment(), "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in _CASES
        ]
        worlds = {
            name: World(hosts, case, int(store.stdout.readline()))
            for (name, case), store in zip(_CASES.items(), stores, strict=True)
        }
        try:
            for world in worlds.values():
                world.cut()
            for world in worlds.values():
                world.go()
            yield {name: world.end() for name, world in worlds.items()}
        finally:
            for world in worlds.values():
                world.close()
            for store in stores:
                store.communicate(timeout=60)


@pytest.mark.parametrize("name", _CASES)
def test_negotiation_over_it_ends_in_time_and_names_the_rank(
    outcomes: dict[str, list[dict[str, Any]]], name: str
) -> None:
    source, target = _CASES[name].cut[0]
    for said in outcomes[name]:
        assert f"no data to or from rank {target} for {_LIMIT} s" in said["text"] or (
            f"no data to or from rank {source} for {_LIMIT} s" in said["text"]
        ), said
        assert _LIMIT <= said["after"] < _BOUND + _BUSY, said
