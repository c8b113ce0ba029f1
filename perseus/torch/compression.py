"""Gradient compression a script chooses by `compression=hvd.Compression.fp16`. Stateless."""

from __future__ import annotations

import torch

from perseus.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating tensors as float16 and returns them in their own dtype; others unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor as float16, and the dtype to go back to."""
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor in the dtype it had."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
