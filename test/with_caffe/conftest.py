"""Data and settings that the tests of the patched Caffe share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from caffe_jobs import CAFFE, train, weights, write_solver
from databases import write_lmdb


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the source of Caffe there is nothing to run; `.ci/caffe.py` says why."""
    if not CAFFE.exists():
        for item in items:
            if "caffe_binary" not in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"{CAFFE} was not built: make test-caffe"))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with digits.txt (HDF5) and digits.lmdb: the same digits in the same order."""
    folder = tmp_path_factory.mktemp("digits")
    read = load_digits()
    pixels, labels = read.images.astype("uint8")[:, None], read.target
    with h5py.File(folder / "digits.h5", "w") as file:
        file["data"] = pixels.astype("float32") / 16
        file["label"] = labels.astype("float32")
    (folder / "digits.txt").write_text(f"{folder / 'digits.h5'}\n")
    write_lmdb(folder / "digits.lmdb", pixels, labels)
    return folder


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """alone(net, **solver) -> the folder of a training by one process, run once for each."""
    done: dict[str, Path] = {}

    def run(net: str, **solver: object) -> Path:
        key = f"{net} {solver}"
        if key not in done:
            folder = tmp_path_factory.mktemp("alone")
            write_solver(folder, net, **solver)
            train(folder, 0)
            assert weights(folder, int(str(solver.get("max_iter", 30))))
            done[key] = folder
        return done[key]

    return run
