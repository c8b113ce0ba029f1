"""Horovod's SyncBatchNorm: batch normalisation over the joined batch of the ranks of init().

Not for use from several threads at once. Source of behaviour: Horovod 0.28.1,
horovod.torch.sync_batch_norm.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from perseus import basics
from perseus.torch.batch_statistics import normalise
from perseus.torch.data_movement import allgather
from perseus.torch.reductions import allreduce
from perseus.torch.session import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics, while training, are those of all ranks together.

    num_features, eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d; momentum
        None means the plain average of all batches so far. Equal on all ranks.

    Input (N, C, ...) of any floating dtype with at least two dimensions; N and the dimensions after
    C may differ between ranks, and N may be 0. The output has its shape, dtype and memory format.
    Gradients of weight and bias are this rank's share; their sum over ranks is the joined batch's.
    In eval mode, and on one rank, it is plain batch normalisation and does not communicate.
    Raises ValueError for inputs of less than two dimensions or another C, and on every rank when
    the joined batch has one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input, times weight, plus bias."""
        self._check_input_dim(input)
        return normalise(self, input, _EXCHANGE if basics.size() > 1 else None)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"[torch] SyncBatchNorm got {input.shape[1]} channels in dimension 1, expected "
                f"{self.num_features}"
            )


class _Exchange:
    """Through the world of init(). Sizes are in the names: other sizes are other tensors to it."""

    @staticmethod
    def gather(row: torch.Tensor) -> torch.Tensor:
        """See batch_statistics.Exchange."""
        channels = (row.numel() - 1) // 2
        return allgather(row.unsqueeze(0), name=f"sync_batch_norm.statistics.{channels}")

    @staticmethod
    def sum(values: torch.Tensor) -> torch.Tensor:
        """See batch_statistics.Exchange."""
        channels = values.numel() // 2
        return allreduce(values, name=f"sync_batch_norm.gradients.{channels}", op=Sum)


_EXCHANGE = _Exchange()
