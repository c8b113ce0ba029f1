"""SyncBatchNorm: batch normalisation over the joined batch of all ranks.

Forward gathers each rank's count, means and squared deviations, and joins them by the parallel
variance formula of Chan, Golub and LeVeque (1979) in float64, so every rank gets the same bits.
One collective per forward, one per backward; both block. Not for use from several threads at once.
Source of behaviour: Horovod 0.28.1, horovod.torch.sync_batch_norm.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from perseus import basics
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
    the joined batch has less than two values per channel.
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
        tracks = self.training and self.track_running_stats
        factor = 0.0 if self.momentum is None else self.momentum
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / int(self.num_batches_tracked)
        used = tracks or not self.training
        running_mean = self.running_mean if used else None
        running_var = self.running_var if used else None
        if not self.training or basics.size() == 1:
            return torch.nn.functional.batch_norm(
                input, running_mean, running_var, self.weight, self.bias,
                self.training or running_mean is None, factor, self.eps,
            )  # fmt: skip
        output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, running_mean, running_var, self.eps, factor
        )
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"[torch] SyncBatchNorm got {input.shape[1]} channels in dimension 1, expected "
                f"{self.num_features}"
            )


class _Normalise(torch.autograd.Function):
    """Normalisation with joined statistics as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        factor: float,
    ) -> torch.Tensor:
        """Join the statistics, move the running ones, normalise."""
        total, mean, squares = _joined_statistics(input)
        if total < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {total} on all ranks "
                f"together; this rank's input has the size {tuple(input.shape)}"
            )
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
        if running_var is not None:
            running_var.lerp_((squares / (total - 1)).to(running_var.dtype), factor)
        kind = _working_dtype(input)
        mean, variance = mean.to(kind), (squares / total).to(kind)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.total, ctx.eps = total, eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.nn.functional.batch_norm(
            input, mean, variance, _as(weight, kind), _as(bias, kind), eps=eps
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """The input's gradient uses the joined sums; the parameters get this rank's sums."""
        input, weight, mean, variance = ctx.saved_tensors
        kind = mean.dtype
        grad, values = grads[0].to(kind), input.to(kind)
        products, totals = _own_sums(grad, values, mean, variance, ctx.eps)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([products, totals]).to(torch.float64)
            name = f"sync_batch_norm.gradients.{mean.numel()}"
            of_product, of_grad = (allreduce(sums, name=name, op=Sum) / ctx.total).to(kind).chunk(2)
            scale = torch.rsqrt(variance + ctx.eps)
            factor = scale if weight is None else scale * weight.to(kind)
            shape = (1, -1, *[1] * (input.dim() - 2))
            grad_input = values - mean.view(shape)
            grad_input.mul_((-factor * scale * of_product).view(shape))
            grad_input.sub_((factor * of_grad).view(shape))
            grad_input = grad_input.addcmul_(grad, factor.view(shape)).to(input.dtype)
        grad_weight = products.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = totals.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _joined_statistics(input: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Values per channel, and per channel their mean and sum of squared deviations, in float64."""
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    own = torch.zeros(2, channels, dtype=torch.float64)
    if count:
        values = input.to(_working_dtype(input))
        own[0], own[1] = torch.batch_norm_update_stats(values, None, None, 0.0)
    # The size is part of the name, so layers of other sizes are other tensors to the core.
    row = torch.cat([own.flatten(), torch.tensor([count], dtype=torch.float64)])
    rows = allgather(row.unsqueeze(0), name=f"sync_batch_norm.statistics.{channels}")
    counts = rows[:, -1:]
    means, variances = rows[:, :channels], rows[:, channels:-1]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    squares = (counts * (variances + (means - mean) ** 2)).sum(0)
    return int(total), mean, squares


def _own_sums(
    grad: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's sums over each channel: gradient times normalised input, and gradient."""
    if values.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # Plain batch normalisation with given statistics has the same gradients of parameters.
    _, products, totals = torch.ops.aten.native_batch_norm_backward(
        grad, values, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return products, totals


def _working_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _as(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(dtype)
