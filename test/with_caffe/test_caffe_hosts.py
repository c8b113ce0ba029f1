"""A bare mpirun over two virtual hosts trains the patched Caffe: there is no Python in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from caffe_jobs import CAFFE, ROOT, TOLERANCE, distance, environment, weights, write_solver
from caffe_nets import lenet
from mpi_launchers import mpi_or_skip

sys.path.insert(0, str(ROOT / "test" / "hosts"))
from virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize(
    ("kind", "option"),
    [pytest.param("openmpi", "--host", marks=pytest.mark.full), ("mpich", "-hosts")],
)
def test_hosts_learn_what_one_process_learns(
    kind: str, option: str, alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    mpirun, _ = mpi_or_skip(kind)
    # Oversubscribed, Open MPI would start them all here.
    mpirun = [word for word in mpirun if word != "--oversubscribe"]
    write_solver(tmp_path, lenet(digits, 32))
    settings = "OPENBLAS_NUM_THREADS=1 PERSEUS_ALLREDUCE_DTYPE=1"
    script = f'cd "{tmp_path}" && {settings} exec "{CAFFE}" train --solver=solver.prototxt'
    command = [*mpirun, option, "host0:1,host1:1", "-np", "2", "sh", "-c", script]
    with VirtualHosts(2) as hosts:
        result = hosts.run(0, command, env={**environment(), **hosts.environment()})
        assert result.returncode == 0, result.stderr
        assert hosts.counters(1)[0].received_bytes > 1000
    assert distance(weights(tmp_path), weights(alone(lenet(digits, 64)))) <= TOLERANCE
