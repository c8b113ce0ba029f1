"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from perseus.compression import (
    BFLOAT16,
    FLOAT16,
    CastCompressor,
    Compressions,
    Compressor,
    NoneCompressor,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)

    @staticmethod
    def cast(tensor: Any, dtype: tf.DType) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """Floating tensors travel as float16 and come back in their own dtype; others unchanged."""

    codec = FLOAT16
    dtype = tf.float16


class BF16Compressor(_Cast):
    """Floating tensors travel as bfloat16 and come back in their own dtype; others unchanged."""

    codec = BFLOAT16
    dtype = tf.bfloat16


class Compression(Compressions):
    """The compressors by name."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
