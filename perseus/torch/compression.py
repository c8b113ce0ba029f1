"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

from functools import partial

import torch

from perseus.compression import (
    BFLOAT16,
    FLOAT16,
    Compressions,
    Compressor,
    NoneCompressor,
    cast_compressor,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

_compressor = partial(
    cast_compressor, is_floating=lambda tensor: tensor.dtype.is_floating_point, cast=torch.Tensor.to
)
FP16Compressor = _compressor("FP16Compressor", FLOAT16, torch.float16)
BF16Compressor = _compressor("BF16Compressor", BFLOAT16, torch.bfloat16)


class Compression(Compressions):
    """The compressors by name."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
