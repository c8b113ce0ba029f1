"""Training by several processes of the patched Caffe gives what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from caffe_jobs import TOLERANCE, distance, train, weights, write_solver
from caffe_nets import lenet

CASES = [
    ("perseusrun", "HDF5Data", 1),
    ("perseusrun", "Data", 2),
    ("openmpi", "HDF5Data", 1),
    ("mpich", "Data", 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_processes_learn_what_one_learns(
    case: tuple[str, str, int], alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    launcher, kind, passes = case
    one_lenet = alone(lenet(digits, 64, kind), snapshot=15)
    write_solver(
        tmp_path, lenet(digits, 64 // 2 // passes, kind), iter_size=passes, snapshot=15, display=10
    )
    output = train(tmp_path, 2, launcher=launcher)
    assert distance(weights(tmp_path, 15), weights(one_lenet, 15)) <= TOLERANCE
    assert distance(weights(tmp_path), weights(one_lenet)) <= TOLERANCE
    # Rank 0 alone reports, and leaves files.
    assert output.count("Iteration 20 (") == 1, output
    assert output.count("Optimization Done") == 2, output
    left = {path.name for path in tmp_path.iterdir()} - {"net.prototxt", "solver.prototxt"}
    assert left == {
        f"weights_iter_{iteration}.{kind}.h5"
        for iteration in (15, 30)
        for kind in ("caffemodel", "solverstate")
    }
