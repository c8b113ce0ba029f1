"""allgather as scripts see it: PERSEUS_CHANGE_HVD_ALLGATHER chooses the layout of the result.

Tensors are joined along dimension 0 as in Horovod. If that variable is 0, they are stacked along a
new dimension of ranks, and need equal shapes. Perseus' own gathers (in data_movement) join.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from perseus import basics
from perseus.process_sets import ProcessSet, global_process_set
from perseus.torch import data_movement
from perseus.torch.untraced import untraced


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0) if basics.stacks_gathered() else tensor


@untraced
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start joining the tensors of all ranks along dimension 0, in rank order; returns a handle.

    tensor: contiguous, at least one dimension; only the first may differ across ranks, and be 0.
    """
    return data_movement.allgather_async(_laid_out(tensor), name, process_set)


@untraced
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks joined along dimension 0, identical on every rank. Differentiable.

    IndexError for a tensor without dimensions. See allgather_async.
    """
    return data_movement.allgather(_laid_out(tensor), name, process_set)


@untraced
def grouped_allgather_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start allgather of several tensors as one operation; returns one handle."""
    return data_movement.grouped_allgather_async(map(_laid_out, tensors), name, process_set)


@untraced
def grouped_allgather(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """allgather of several tensors as one operation. Differentiable."""
    return data_movement.grouped_allgather(map(_laid_out, tensors), name, process_set)
