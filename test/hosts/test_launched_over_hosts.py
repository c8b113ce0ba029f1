"""Programs without Python, started by mpirun over virtual hosts, meet by themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_ranks import compile_rank, places
from mpi_launchers import mpi_or_skip

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_rank(tmp_path_factory.mktemp("launched")))


# What Perseus' ranks say on host0, host0, host1, host1.
_TWO_BY_TWO = [
    ["0", "4", "0", "2", "0", "2"],
    ["1", "4", "1", "2", "0", "2"],
    ["2", "4", "0", "2", "1", "2"],
    ["3", "4", "1", "2", "1", "2"],
]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    file = tmp_path / "hosts"
    file.write_text("host0 slots=3\nhost1 slots=3\n")
    return str(file)


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "built-in"])
def test_npernode_and_hostfile_place_the_ranks_of_perseusrun(
    hosts: VirtualHosts, rank: str, hostfile: str, kind: str
) -> None:
    env = {**hosts.environment(), "HOROVOD_START_TIMEOUT": "50", "TEXT": "a 'b'\n$c"}
    flags = ["-npernode", "2", "-hostfile", hostfile]
    if kind != "built-in":
        mpirun, _ = mpi_or_skip(kind)
        env["PATH"] = f"{hosts.ssh_config.parent}/bin:{Path(mpirun[0]).parent}:{env['PATH']}"
        flags.append("--mpi")
    env["PYTHONPATH"] = str(_ROOT)
    check = f'[ "$TEXT" = "a \'b\'\n\\$c" ] && exec {rank} 1'
    command = [sys.executable, "-m", "perseus.run", *flags, "sh", "-c", check]
    result = hosts.run(0, command, env=env)
    assert result.returncode == 0, result.stderr
    found = places(result.stdout.replace("] ", "]:"))  # MPICH's prefix has no colon
    assert [line[:6] for line in found] == _TWO_BY_TWO


@pytest.mark.parametrize(
    ("kind", "options"), [("openmpi", ["-npernode", "2"]), ("mpich", ["-ppn", "2", "-np", "4"])]
)
def test_npernode_and_hostfile_of_a_bare_mpirun(
    hosts: VirtualHosts, rank: str, hostfile: str, kind: str, options: list[str]
) -> None:
    mpirun, _ = mpi_or_skip(kind)
    mpirun = [word for word in mpirun if word != "--oversubscribe"]
    if kind == "mpich":  # its files have other lines
        Path(hostfile).write_text("host0:3\nhost1:3\n")
    env = {**hosts.environment(), "HOROVOD_START_TIMEOUT": "50"}
    result = hosts.run(0, [*mpirun, *options, "-hostfile", hostfile, rank, "1"], env=env)
    assert result.returncode == 0, result.stderr
    assert [line[:6] for line in places(result.stdout)] == _TWO_BY_TWO


@pytest.mark.parametrize(("kind", "option"), [("openmpi", "--host"), ("mpich", "-hosts")])
def test_ranks_of_mpirun_meet(hosts: VirtualHosts, rank: str, kind: str, option: str) -> None:
    mpirun, _ = mpi_or_skip(kind)
    # Oversubscribed, Open MPI would start them all here.
    mpirun = [word for word in mpirun if word != "--oversubscribe"]
    command = [*mpirun, option, "host0:1,host1:2", "-np", "3", rank, "2"]
    before = hosts.counters(1)[0]
    result = hosts.run(0, command, env={**hosts.environment(), "HOROVOD_START_TIMEOUT": "50"})
    assert result.returncode == 0, result.stderr
    sums = ["111", "222", "333"]
    expected = [
        ["0", "3", "0", "1", "0", "2", "tcp", *sums],
        ["1", "3", "0", "2", "1", "2", "shm", *sums],
        ["2", "3", "1", "2", "0", "1", "none", *sums],
    ]
    assert places(result.stdout) == [line for line in expected for _ in range(2)]
    assert (hosts.counters(1)[0] - before).received_bytes > 1000
    env = {**hosts.environment(), "HOROVOD_GLOO_IFACE": "eth7"}
    refused = hosts.run(0, command, env=env)
    assert refused.returncode != 0
    assert "HOROVOD_GLOO_IFACE names 'eth7', which does not exist" in refused.stderr
