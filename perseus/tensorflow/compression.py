"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from perseus.compression import (
    BFLOAT16,
    FLOAT16,
    AutoCompressor,
    Compressor,
    Int8Compressor,
    NoneCompressor,
    SettingsCompressor,
    rotate,
    top_k,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _NarrowCompressor(Compressor):
    in_core = True

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in the dtype it had."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


def _narrow(tensor: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """The tensor in 16 bits, and the dtype to go back to."""
    if not tensor.dtype.is_floating:
        return tensor, None
    return tf.cast(tensor, dtype), tensor.dtype


class FP16Compressor(_NarrowCompressor):
    """Floating tensors travel as float16 and come back in their own dtype; others unchanged."""

    codec = FLOAT16

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor as float16, and the dtype to go back to."""
        return _narrow(tensor, tf.float16)


class BF16Compressor(_NarrowCompressor):
    """Floating tensors travel as bfloat16 and come back in their own dtype; others unchanged."""

    codec = BFLOAT16

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor as bfloat16, and the dtype to go back to."""
        return _narrow(tensor, tf.bfloat16)


class Compression:
    """The compressors by name. The lossy ones act between hosts only; see docs/algorithms.md."""

    settings = SettingsCompressor
    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    topk = staticmethod(top_k)
    rotate = staticmethod(rotate)
    auto = AutoCompressor
