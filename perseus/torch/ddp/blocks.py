"""Encodes float32 as blocks of small numbers with one scale each. Stateless.

A row of n elements, n a multiple of BLOCK, becomes n numbers of int8, float16 or bfloat16, followed
by n / BLOCK scales of float32; element = number * scale. A block that contains Inf or NaN has the
scale NaN. The scales are those of the core's codecs (docs/algorithms.md): with int8, the largest
magnitude / 127 cut to 16 significant bits, so that rounding errors are floats; otherwise a power of
two, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 256
# Blocks that the processor's cache holds while they are encoded.
_CACHED_BLOCKS = 1024
_SMALLEST_INT8 = 2.0**-118
_SMALLEST_POWER = 2.0**-110
_EXPONENT = 0x7F800000
_SIXTEEN_BITS = -256  # as a mask


class Format:
    """A way to encode. keeps_errors: whether rounding errors are worth keeping."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.keeps_errors = dtype == torch.int8

    def bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` elements."""
        return width * self._dtype.itemsize + width // BLOCK * torch.float32.itemsize

    def encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Encode values, of shape (rows, width), into message, uint8 of shape (rows, bytes).

        With keeps_errors, the rounding errors replace the values, or 0 where they are not finite.
        """
        for part, numbers, scales in self._slabs(values, message):
            work = part.abs()
            scale = self._scale(work.amax(dim=-1, keepdim=True))  # faster than aminmax
            inverse = torch.where(scale == 0, scale, scale.reciprocal())
            torch.mul(part, inverse, out=work)
            numbers.copy_(work.round_() if self._dtype == torch.int8 else work)
            scales.copy_(scale)
            if self.keeps_errors:
                torch.mul(numbers, scale, out=work)
                part.sub_(work).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, message: torch.Tensor, values: torch.Tensor, add: bool = False) -> None:
        """Set values, or add to them, what encode() has made message of."""
        for part, numbers, scales in self._slabs(values, message):
            if add:
                part.add_(numbers * scales)
            else:
                torch.mul(numbers, scales, out=part)

    def _scale(self, largest: torch.Tensor) -> torch.Tensor:
        if self._dtype == torch.int8:
            scale = (largest / 127).view(torch.int32).bitwise_and_(_SIXTEEN_BITS)
            scale = torch.where(largest < _SMALLEST_INT8, 0.0, scale.view(torch.float32))
        else:
            power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
            scale = power.clamp_(min=_SMALLEST_POWER) * 2.0**-14
        return torch.where(largest.isfinite(), scale, torch.nan)

    def _slabs(
        self, values: torch.Tensor, message: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield parts of (values, numbers, scales), of shapes (…, BLOCK), (…, BLOCK), (…, 1)."""
        rows, width = values.shape
        shape = rows, width // BLOCK, BLOCK
        end = width * self._dtype.itemsize
        blocks = values.view(shape)
        numbers = message[:, :end].view(self._dtype).view(shape)
        scales = message[:, end:].view(torch.float32).unsqueeze(2)
        if values.device.type != "cpu":
            yield blocks, numbers, scales
            return
        for row in range(rows):
            for first in range(0, shape[1], _CACHED_BLOCKS):
                some = row, slice(first, first + _CACHED_BLOCKS)
                yield blocks[some], numbers[some], scales[some]
