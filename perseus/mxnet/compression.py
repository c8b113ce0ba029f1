"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

from functools import partial

import numpy as np

from perseus.compression import (
    BFLOAT16,
    FLOAT16,
    Compressions,
    Compressor,
    NoneCompressor,
    cast_compressor,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

# MXNet's name for bfloat16, which NumPy lacks: the field of a record.
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

_compressor = partial(
    cast_compressor,
    is_floating=lambda tensor: np.dtype(tensor.dtype).kind == "f",
    cast=lambda tensor, dtype: tensor.astype(dtype),
)
FP16Compressor = _compressor("FP16Compressor", FLOAT16, np.float16)
BF16Compressor = _compressor("BF16Compressor", BFLOAT16, _BFLOAT16)


class Compression(Compressions):
    """The compressors by name."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
