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
            item.add_marker(pytest.mark.skip(reason=f"{CAFFE} was not built: make test-caffe"))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same digits in the same order as digits.txt (HDF5), digits.lmdb, and
    parts.txt (three files of HDF5).
    """
    folder = tmp_path_factory.mktemp("digits")
    read = load_digits()
    pixels, labels = read.images.astype("uint8")[:, None], read.target
    parts = {"digits": slice(None), "a": slice(500), "b": slice(500, 801), "c": slice(801, None)}
    for name, part in parts.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["data"] = pixels[part].astype("float32") / 16
            file["label"] = labels[part].astype("float32")
    (folder / "digits.txt").write_text(f"{folder}/digits.h5\n")
    (folder / "parts.txt").write_text("".join(f"{folder}/{name}.h5\n" for name in "abc"))
    write_lmdb(folder / "digits.lmdb", pixels, labels)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 101 digits as images, list.txt for ImageData, windows.txt for WindowData."""
    folder = tmp_path_factory.mktemp("images")
    read = load_digits()
    lines, windows = [], []
    for index, (image, label) in enumerate(zip(read.images[:101], read.target, strict=False)):
        path = folder / f"{index}.pgm"
        path.write_bytes(b"P5 8 8 255\n" + image.astype("uint8").tobytes())
        lines.append(f"{path} {label}\n")
        # A window around the whole of it, and one of background. Read in colour: 3 channels.
        boxes = f"{label % 9 + 1} 1.0 0 0 7 7\n0 0.1 {index % 4} 1 6 7\n"
        windows.append(f"# {index}\n{path}\n3\n8\n8\n2\n{boxes}")
    (folder / "list.txt").write_text("".join(lines))
    (folder / "windows.txt").write_text("".join(windows))
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
