"""Scripts with the KVStore as users start them: by perseusrun, and by a bare mpirun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("mxnet")
pytest.importorskip("sklearn")

from mpi_launchers import mpi_or_skip

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mxnet_module_fit.py"


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy: (\d\.\d+)", output)]


@pytest.mark.full
def test_module_fit_learns(run_ranks):
    status, output = run_ranks(2, [sys.executable, str(EXAMPLE)], timeout=300)
    assert status == 0, output
    (accuracy,) = accuracies(output)  # rank 0 alone
    assert accuracy >= 0.97


@pytest.mark.full
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_store_joins_the_world_of_a_bare_mpirun(kind):
    mpirun, python = mpi_or_skip(kind)
    foreign = ("PERSEUS_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    result = subprocess.run(
        [*mpirun, "-np", "2", python, EXAMPLE, "--epochs", "6"],
        # The python of another environment has an mpi4py of its own, and MXNet from here.
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (accuracy,) = accuracies(result.stdout)
    assert accuracy >= 0.9
