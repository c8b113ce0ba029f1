"""Jobs of the patched Caffe: what is given to them, how they are started, what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi_launchers import mpi_or_skip
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
CAFFE = ROOT / "build" / "caffe" / "build" / "tools" / "caffe"
REPLICAS = CAFFE.with_name("replicas")
TOLERANCE = 1e-6

SOLVER = {
    "net": '"net.prototxt"',
    "base_lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.0005,
    "lr_policy": '"fixed"',
    "max_iter": 30,
    "snapshot_prefix": '"weights"',
    "snapshot_format": "HDF5",
    "solver_mode": "CPU",
    "random_seed": 7,
}


def write_solver(directory: Path, net: str, name: str = "solver.prototxt", **more: object) -> None:
    """A solver and its net, in a folder; `more` goes before what SOLVER says."""
    (directory / "net.prototxt").write_text(net)
    lines = [f"{key}: {value}" for key, value in {**SOLVER, **more}.items()]
    (directory / name).write_text("\n".join(lines))


def launched(ranks: int, launcher: str = "perseusrun") -> list[str]:
    """The start of a command line that has `ranks` processes started; 0 = none of a launcher."""
    if ranks == 0:
        return []
    if launcher == "perseusrun":
        return [sys.executable, "-m", "perseus.run", "-np", str(ranks)]
    command, _ = mpi_or_skip(launcher)
    return [*command, "-np", str(ranks)]


def environment(**variables: str) -> dict[str, str]:
    """One thread for each rank's algebra, and `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not _is_identity(name)}
    return {**inherited, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **variables}


def _is_identity(name: str) -> bool:
    return name.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_", "PERSEUS_RANK", "PERSEUS_SIZE"))


def start(directory: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    """A job in a session of its own, whose output comes together."""
    return subprocess.Popen(
        command, cwd=directory, env=environment(**variables), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(job: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str]:
    """(status, output); a job that takes longer is ended, all of it, and the test with it."""
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        pytest.fail(f"still running after {timeout} s:\n{output}")
    return job.returncode, output


def train(
    directory: Path, ranks: int, *options: str, launcher: str = "perseusrun", **variables: str
) -> str:
    """What a training says that ends well."""
    command = [*launched(ranks, launcher), str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(directory, [*command, *options], **variables))
    assert status == 0, output
    return output


def replicas(
    directory: Path, ranks: int, dtype: str, wish: str = "", first: str = "", **variables: str
) -> NDArray[np.floating]:
    """Trains; returns what replicas.cc has recorded, with a row for each rank.

    first: the file of a solver to train before, in the same processes.
    wish: "RANK:ITERATION:snapshot" or "…:stop", for what a user asks that process.
    """
    solvers = ",".join(filter(None, [first, "solver.prototxt"]))
    command = [*launched(ranks), str(REPLICAS), solvers, dtype, *filter(None, [wish])]
    status, output = finish(start(directory, command, **variables))
    assert status == 0, output
    return recorded(directory, ranks, dtype)


def recorded(directory: Path, ranks: int, dtype: str = "float") -> NDArray[np.floating]:
    """A row for each rank: all its parameters at the beginning of each iteration and at the end."""
    kind = {"float": np.float32, "double": np.float64}[dtype]
    return np.stack([np.fromfile(directory / f"replica{i}.bin", kind) for i in range(ranks)])


def weights(directory: Path, iteration: int = 30) -> dict[str, NDArray[np.float32]]:
    """What was learned, by layer and number: the snapshot of that iteration."""
    found: dict[str, NDArray[np.float32]] = {}

    def keep(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(directory / f"weights_iter_{iteration}.caffemodel.h5") as file:
        file["data"].visititems(keep)
    assert found
    return found


def distance(left: dict[str, NDArray[np.float32]], right: dict[str, NDArray[np.float32]]) -> float:
    """The largest difference between two sets of weights."""
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)
