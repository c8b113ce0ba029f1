"""Training with Caffe goes on, or ends in time with the rank named, whatever happens to it."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from caffe_jobs import REPLICAS, finish, launched, recorded, start, write_solver
from caffe_nets import lenet
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))

import declared_faults
from live_ranks import Launch

_STEPS, _FOR_EVER = 12, 100_000_000
# Before it trains, a process of Caffe asks for all that it needs: for a net that is much too large.
# (One with a little too few is no fault to see: OpenBLAS asks again and again.)
_SHORT = {"memory": "ulimit -v 4000000 && cd large", "descriptors": "ulimit -n 12"}


def _command(digits: Path, case: declared_faults.Case, directory: Path) -> list[str]:
    what, rank, step = case.fault[:3]
    endless = what in ("launcher killed", "terminal gone")
    write_solver(directory, lenet(digits, 16), max_iter=_FOR_EVER if endless else _STEPS, display=1)
    if what == "memory":
        (directory / "large").mkdir()
        net = lenet(digits, 16).replace("num_output: 32", "num_output: 20000000")
        write_solver(directory / "large", net)
    note = """printf '{"event": "ready", "pid": %s}\\n' $$ > $PERSEUS_RANK.notes"""
    # Caffe itself says nothing on standard output.
    train = f"echo it trains; exec {REPLICAS} solver.prototxt float"
    if step == 0:
        return [
            "sh",
            "-c",
            f"{note}; [ $PERSEUS_RANK != {rank} ] || {_SHORT.get(what, ':')}; {train}",
        ]
    return ["sh", "-c", f"{note}; {train} {rank}:{step}:hold"]


@functools.cache
def _undisturbed(digits: Path, ranks: int) -> NDArray[np.float32]:
    """The parameters that so many ranks end with."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_solver(directory, lenet(digits, 16), max_iter=_STEPS)
        command = [*launched(ranks), str(REPLICAS), "solver.prototxt", "float"]
        status, output = finish(start(directory, command))
        assert status == 0, output
        return _ends(directory, ranks)[0]


def _ends(directory: Path, ranks: int) -> NDArray[np.float32]:
    return recorded(directory, ranks).reshape(ranks, _STEPS + 1, -1)[:, -1]


def _is_right(digits: Path, launch: Launch, case: declared_faults.Case) -> bool:
    ends = _ends(launch.directory, case.ranks)
    # Over TCP, gradients travel as float16.
    tolerance = 0.0 if case.place == "shm" else 5e-3
    expected = _undisturbed(digits, case.ranks)
    return bool((ends == ends[0]).all() and np.abs(ends[0] - expected).max() <= tolerance)


@pytest.mark.parametrize(
    "case",
    declared_faults.cases(
        "caffe", ["memory (1, 0), shm", "stopped (1, 4), tcp"], at_start=["memory"]
    ),
)
def test_a_fault(case: declared_faults.Case, digits: Path, tmp_path: Path) -> None:
    program = declared_faults.Program(
        functools.partial(_command, digits), functools.partial(_is_right, digits)
    )
    declared_faults.run(case, tmp_path, program)
