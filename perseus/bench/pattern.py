"""Test data: values that differ per rank and index, with sums that float32 holds exactly. Pure."""

from __future__ import annotations

import torch


def values(rank: int, count: int) -> torch.Tensor:
    """float32 (count,): whole numbers below 1021 + rank."""
    return torch.arange(count).mul_(7).add_(13 * rank).remainder_(1021).add_(rank).float()


def total(ranks: int, count: int, first: int = 0) -> torch.Tensor:
    """The sum of values(first) … values(first + ranks - 1)."""
    result = values(first, count)
    for rank in range(first + 1, first + ranks):
        result += values(rank, count)
    return result
