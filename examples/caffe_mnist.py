"""Writes what a Caffe with our patches trains LeNet on: `python caffe_mnist.py DIRECTORY`.

Then: cd DIRECTORY && perseusrun -np 2 caffe train --solver lenet_solver.prototxt
Caffe with patches/bvlc_caffe does the rest; there is no Python in its processes.
"""

import argparse
import shutil
from pathlib import Path

from mnist_data import extra, load_digits

with extra():
    import h5py


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "test"), load_digits(), strict=True):
        with h5py.File(directory / f"{name}.h5", "w") as file:
            file["data"] = images.transpose(0, 3, 1, 2)
            file["label"] = labels.astype("float32")
        (directory / f"{name}.txt").write_text(f"{name}.h5\n")
    for part in (Path(__file__).parent / "caffe").glob("*.prototxt"):
        shutil.copy(part, directory)


if __name__ == "__main__":
    main()
