"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from perseus.compression import (
    BFLOAT16,
    FLOAT16,
    Compressions,
    Compressor,
    NoneCompressor,
    cast_compressor,
)
from perseus.tensorflow.modes import converted

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

_compressor = partial(
    cast_compressor, is_floating=lambda tensor: bool(tensor.dtype.is_floating), cast=tf.cast
)
FP16Compressor = _compressor("FP16Compressor", FLOAT16, tf.float16)
BF16Compressor = _compressor("BF16Compressor", BFLOAT16, tf.bfloat16)


class Compression(Compressions):
    """The compressors by name."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def in_graphs(compression: Any) -> Any:
    """A compressor that may be the script's: its functions may depend on values of tensors."""
    return SimpleNamespace(
        compress=converted(compression.compress), decompress=converted(compression.decompress)
    )
