"""Databases as Caffe's Data layer reads them, written without Caffe."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray


def write_lmdb(folder: Path, images: NDArray[np.uint8], labels: Iterable[int]) -> None:
    """(count, channels, height, width) and as many labels."""
    with lmdb.open(str(folder), map_size=1 << 26) as database, database.begin(write=True) as batch:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            batch.put(f"{index:08}".encode(), _datum(image, int(label)))


def _datum(image: NDArray[np.uint8], label: int) -> bytes:
    """caffe.Datum: channels = 1, height = 2, width = 3, data = 4 (bytes), label = 5."""
    data = image.tobytes()
    fields = [(number << 3, _varint(size)) for number, size in enumerate(image.shape, 1)]
    fields += [(4 << 3 | 2, _varint(len(data)) + data), (5 << 3, _varint(label))]
    return b"".join(_varint(key) + value for key, value in fields)


def _varint(value: int) -> bytes:
    coded = bytearray()
    while value > 0x7F:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)
