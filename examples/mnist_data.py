"""Handwritten digits as NumPy arrays, and the options that the examples have in common.

The 1797 digits that ship with scikit-learn (8 x 8 pixels), or MNIST's own idx files
(train-images-idx3-ubyte and so on, plain or .gz) from a folder. No framework is needed.
"""

import argparse
import contextlib
import gzip
from pathlib import Path


@contextlib.contextmanager
def extra():
    """Goes around imports that Perseus itself does not need: says how to get what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the examples need {error.name}, which is not installed: "
            "pip install 'perseus-training[examples]'"
        ) from None


with extra():
    import numpy as np


def load(directory=None):
    """((images, labels), (test images, test labels)), from the folder where one is given.

    Images are (count, side, side, 1), float32 from 0 to 1; labels are int32.
    """
    return load_mnist(directory) if directory else load_digits()


def load_digits():
    """scikit-learn's digits: every fifth one is for testing."""
    with extra():
        from sklearn import datasets

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    test = np.arange(len(labels)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def load_mnist(directory):
    """MNIST from its idx files: big-endian sizes behind a magic number, then bytes."""

    def read(name):
        path = directory / name
        opener = open if path.exists() else gzip.open
        with opener(path if path.exists() else directory / f"{name}.gz", "rb") as file:
            data = file.read()
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)

    def part(kind):
        images = read(f"{kind}-images-idx3-ubyte")[..., None].astype(np.float32) / 255
        return images, read(f"{kind}-labels-idx1-ubyte").astype(np.int32)

    return part("train"), part("t10k")


def share_of(data, rank, size):
    """A rank's part of (images, labels), as long as every other's: nobody waits for a batch."""
    length = len(data[1]) // size
    return tuple(array[rank::size][:length] for array in data)


def parser(description):
    """What the examples let one choose."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--epochs", type=int, default=15, help="passes over the data (15)")
    found.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    found.add_argument("--lr", type=float, default=0.04, help="learning rate of one rank (0.04)")
    found.add_argument("--seed", type=int, default=42, help="for weights and shuffling (42)")
    found.add_argument("--data-dir", type=Path, help="folder with MNIST's idx files")
    return found
