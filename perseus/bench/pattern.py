"""Test data: values that differ per rank and index, and whose float32 sums are exact.

Pure functions, thread-safe.
"""

from __future__ import annotations

import torch


def values(rank: int, count: int) -> torch.Tensor:
    """Return a float32 tensor of shape (count,) with whole numbers below 1021 + rank."""
    return torch.arange(count).mul_(7).add_(13 * rank).remainder_(1021).add_(rank).float()


def total(ranks: int, count: int, first: int = 0) -> torch.Tensor:
    """Return the sum of values(first, count) to values(first + ranks - 1, count)."""
    result = values(first, count)
    for rank in range(first + 1, first + ranks):
        result += values(rank, count)
    return result
