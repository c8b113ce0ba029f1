"""Programs without Python, started by a bare mpirun over virtual hosts, meet by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launched_ranks import compile_rank, places
from mpi_launchers import mpi_or_skip

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_rank(tmp_path_factory.mktemp("launched")))


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
    message = (
        "network interface 'eth7': no such interface or no IPv4 address; this host has eth0, lo"
    )
    assert message in refused.stderr
