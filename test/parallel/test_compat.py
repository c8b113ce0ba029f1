"""An unmodified script for Horovod on real ranks: perseusrun --horovod, and a bare mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest
from mpi_launchers import mpi_or_skip
from ranks.launch import PARALLEL, run_ranks

pytest.importorskip("torch")

SCRIPT = PARALLEL / "programs" / "horovod_script.py"


_IN_PAIRS = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "2", "LIGHT_TOPK_FP16": "1"}


def _all_finished(output: str, ranks: int) -> bool:
    return all(f"rank {r} of {ranks} finished, horovod 0.28.1" in output for r in range(ranks))


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.full),
        pytest.param(4, 0, marks=pytest.mark.full),
    ],
)
def test_script_for_horovod_runs_unmodified_under_perseusrun(ranks, workers):
    command = [sys.executable, str(SCRIPT), "--rate", "0.1", "--workers", str(workers)]
    status, output = run_ranks(ranks, ["--horovod", *command])
    assert status == 0, output
    assert _all_finished(output, ranks), output


@pytest.mark.parametrize(
    ("kind", "ranks", "light"),
    [
        pytest.param("openmpi", 2, {"LIGHT_2D_ALLREDUCE": "0"}, marks=pytest.mark.full),
        pytest.param("openmpi", 3, _IN_PAIRS, marks=pytest.mark.full),
        ("openmpi", 4, _IN_PAIRS),
        pytest.param("mpich", 4, _IN_PAIRS, marks=pytest.mark.full),
    ],
)
def test_script_for_horovod_runs_under_mpirun_with_the_sibling_products_variables(
    kind, ranks, light
):
    mpirun, python = mpi_or_skip(kind)
    variables = {
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": "0",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_THRESHOLD": "2097152",
        "OMP_NUM_THREADS": "1",
        # The python of another environment has an mpi4py of its own, and PyTorch from here.
        "PYTHONPATH": os.pathsep.join([str(PARALLEL.parents[1]), sysconfig.get_path("purelib")]),
        **light,
    }
    foreign = ("PERSEUS_", "HOROVOD_", "LIGHT_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    options = ["-np", str(ranks), "--bind-to", "none"]
    if kind == "openmpi":
        options += [word for name in variables for word in ("-x", name)]
    result = subprocess.run(
        [*mpirun, *options, python, "-m", "perseus.compat.horovod", SCRIPT, "--rate", "0.1"],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert _all_finished(result.stdout, ranks), result.stdout
