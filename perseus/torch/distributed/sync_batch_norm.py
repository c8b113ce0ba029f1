"""torch.nn.SyncBatchNorm on CPU tensors, which torch's own refuses, in groups of Perseus.

Results are those of perseus.torch.horovod.SyncBatchNorm.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perseus.torch.batch_statistics import normalise


class _Exchange:
    """Through a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """See batch_statistics.Exchange."""
        rows = row.new_empty(dist.get_world_size(self._group), row.numel())
        dist.all_gather_into_tensor(rows, row, group=self._group)
        return rows

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """See batch_statistics.Exchange."""
        dist.all_reduce(values, group=self._group)
        return values


def accept_cpu_tensors() -> None:
    """Let SyncBatchNorm take CPU tensors in groups of Perseus, and DistributedDataParallel take it.

    A second call does nothing.
    """
    if hasattr(torch.nn.SyncBatchNorm.forward, "__wrapped__"):
        return
    original = torch.nn.SyncBatchNorm.forward
    check: Any = DistributedDataParallel._passing_sync_batchnorm_handle

    @functools.wraps(original)
    def forward(self: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        if input.device.type != "cpu" or not self.training or not dist.is_initialized():
            return original(self, input)
        group = self.process_group or dist.group.WORLD
        if not _is_ours(group):
            return original(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return normalise(self, input, _Exchange(group) if dist.get_world_size(group) > 1 else None)

    @functools.wraps(check)
    def check_layers(self: DistributedDataParallel, module: torch.nn.Module) -> None:
        if not _is_ours(self.process_group):
            check(self, module)

    torch.nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]
    DistributedDataParallel._passing_sync_batchnorm_handle = check_layers  # type: ignore[method-assign]


def _is_ours(group: Any) -> bool:
    return "cpu:perseus" in dist.get_backend_config(group).split(",")
