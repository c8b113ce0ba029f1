"""Ranks that a real srun starts, by each way it may introduce them: --mpi=none, pmi2 and pmix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_ranks import compile_rank, places
from slurm_cluster import Cluster, running

pytestmark = pytest.mark.full

_SECRET = "0123456789abcdef0123456789abcdef"
_HVD = """
import torch
import perseus.torch.horovod as hvd
for world in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([1, 2, 3]) * 10 ** hvd.rank(), op=hvd.Sum).tolist()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    print(*place, hvd.cross_rank(), hvd.cross_size(), "-", *total, flush=True)
    hvd.shutdown()
"""
_SUMS = {2: ["11", "22", "33"], 3: ["111", "222", "333"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(params=["none", "pmi2", "pmix"])
def mpi(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    probe = cluster.run("srun", f"--mpi={request.param}", "-n", "1", "true")
    if probe.returncode != 0:
        pytest.skip(f"no srun --mpi={request.param} (pmix: apt-get install libpmix-dev): {probe}")
    return str(request.param)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_rank(tmp_path_factory.mktemp("launched")))


def expect_worlds(output: str, nodes: list[int]) -> None:
    """Every rank was in two worlds, in its place on one of the nodes with so many ranks each."""
    size = sum(nodes)
    on_nodes = [(local, node) for node, count in enumerate(nodes) for local in range(count)]
    expected = []
    for number, (local, node) in enumerate(on_nodes):
        owners = [i for i, count in enumerate(nodes) if count > local]
        place = [number, size, local, nodes[node], owners.index(node), len(owners)]
        expected += [[str(value) for value in place] + _SUMS[size]] * 2
    assert [line[:6] + line[7:] for line in places(output)] == expected


def test_ranks_meet_by_their_secret(cluster: Cluster, mpi: str, rank: str) -> None:
    for program in ([sys.executable, "-W", "ignore", "-c", _HVD], [rank, "2"]):
        command = ["srun", f"--mpi={mpi}", "-n", "2", "-N", "1", *program]
        result = cluster.run(*command, PERSEUS_SECRET=_SECRET)
        assert result.returncode == 0, result.stderr
        expect_worlds(result.stdout, [2])


# Not with pmix: Slurm's own plugin launches no step on two nodes that are one host.
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_ranks_of_two_nodes_meet(cluster: Cluster, mpi: str, rank: str) -> None:
    for program in ([sys.executable, "-W", "ignore", "-c", _HVD], [rank, "2"]):
        command = ["srun", f"--mpi={mpi}", "-n", "3", "-N", "2", "-m", "block", *program]
        result = cluster.run(*command, PERSEUS_SECRET=_SECRET)
        assert result.returncode == 0, result.stderr
        expect_worlds(result.stdout, [2, 1])


def test_programs_without_python_meet_by_pmi(cluster: Cluster, mpi: str, rank: str) -> None:
    for nodes in [[2]] if mpi == "pmix" else [[2], [2, 1]]:
        command = ["srun", f"--mpi={mpi}", "-n", str(sum(nodes)), "-N", str(len(nodes))]
        result = cluster.run(*command, "-m", "block", rank, "2")
        if mpi == "none":
            assert result.returncode != 0
            assert "[rendezvous] the ranks need a shared secret" in result.stderr
        else:
            assert result.returncode == 0, result.stderr
            expect_worlds(result.stdout, nodes)


def test_python_without_secret_is_told(cluster: Cluster) -> None:
    result = cluster.run("srun", "-n", "2", "-N", "1", sys.executable, "-c", _HVD)
    assert result.returncode != 0
    assert "export PERSEUS_SECRET=$(openssl rand -hex 16) before srun" in result.stderr


def test_python_without_mpi4py_meets_by_pmi(cluster: Cluster) -> None:
    hidden = "import sys; sys.modules['mpi4py'] = None\n" + _HVD
    command = ["srun", "--mpi=pmi2", "-n", "3", "-N", "2", "-m", "block"]
    result = cluster.run(*command, sys.executable, "-W", "ignore", "-c", hidden)
    assert result.returncode == 0, result.stderr
    expect_worlds(result.stdout, [2, 1])


def test_steps_of_a_job_run_side_by_side(cluster: Cluster, rank: str, tmp_path: Path) -> None:
    """Each has a port of its own."""
    batch = tmp_path / "steps"
    step = f"srun --overlap -n 2 -N 1 {rank} 2"
    batch.write_text(f"{step} &\n{step} && wait $!\n")
    command = ["salloc", "--quiet", "-N", "1", "-n", "2", "sh", str(batch)]
    result = cluster.run(*command, PERSEUS_SECRET=_SECRET)
    assert result.returncode == 0, result.stderr
    lines = places(result.stdout)
    assert [line[0] for line in lines] == ["0"] * 4 + ["1"] * 4
    assert all(line[7:] == _SUMS[2] for line in lines)
