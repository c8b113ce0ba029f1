"""Batch normalisation over the joined batch of all ranks: the arithmetic, whoever moves the data.

Forward gathers each rank's count, means and squared deviations, and joins them by the parallel
variance formula of Chan, Golub and LeVeque (1979) in float64, so every rank gets the same bits.
One collective per forward, one per backward; both block. Not for use from several threads at once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class Exchange(Protocol):
    """What moves the statistics of one layer between its ranks."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row, as the rows of one tensor in the order of ranks."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values."""


def normalise(layer: _BatchNorm, input: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
    """What `layer` makes of its input. Moves its running statistics while training.

    exchange: None on one rank; otherwise the joined statistics are used while training.
    """
    tracks = layer.training and layer.track_running_stats
    factor = 0.0 if layer.momentum is None else layer.momentum
    if tracks and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            factor = 1.0 / int(layer.num_batches_tracked)
    used = tracks or not layer.training
    running_mean = layer.running_mean if used else None
    running_var = layer.running_var if used else None
    if not layer.training or exchange is None:
        return torch.nn.functional.batch_norm(
            input, running_mean, running_var, layer.weight, layer.bias,
            layer.training or running_mean is None, factor, layer.eps,
        )  # fmt: skip
    output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, layer.weight, layer.bias, running_mean, running_var, layer.eps, factor, exchange
    )
    return output


class _Normalise(torch.autograd.Function):
    """Normalisation with joined statistics as a node of the autograd graph."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        factor: float,
        exchange: Exchange,
    ) -> torch.Tensor:
        """Join the statistics, move the running ones, normalise."""
        total, mean, squares = _joined_statistics(input, exchange)
        if total == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 on all ranks "
                f"together; this rank's input has the size {tuple(input.shape)}"
            )
        # Without values, plain batch normalisation leaves the running statistics, too.
        if running_mean is not None and total:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
        if running_var is not None and total:
            running_var.lerp_((squares / (total - 1)).to(running_var.dtype), factor)
        kind = _working_dtype(input)
        mean, variance = mean.to(kind), (squares / total).to(kind)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.total, ctx.eps, ctx.exchange = total, eps, exchange
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
            of_product, of_grad = (ctx.exchange.sum(sums) / ctx.total).to(kind).chunk(2)
            scale = torch.rsqrt(variance + ctx.eps)
            factor = scale if weight is None else scale * weight.to(kind)
            shape = (1, -1, *[1] * (input.dim() - 2))
            grad_input = values - mean.view(shape)
            grad_input.mul_((-factor * scale * of_product).view(shape))
            grad_input.sub_((factor * of_grad).view(shape))
            grad_input = grad_input.addcmul_(grad, factor.view(shape)).to(input.dtype)
        grad_weight = products.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = totals.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _joined_statistics(
    input: torch.Tensor, exchange: Exchange
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Values per channel, and per channel their mean and sum of squared deviations, in float64."""
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    own = torch.zeros(2, channels, dtype=torch.float64, device=input.device)
    if count:
        values = input.to(_working_dtype(input))
        own[0], own[1] = torch.batch_norm_update_stats(values, None, None, 0.0)
    row = torch.cat([own.flatten(), own.new_tensor([count])])
    rows = exchange.gather(row)
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
    if values.is_cuda:  # the operation below wants the statistics of training there
        scale = torch.rsqrt(variance + eps)
        totals, products, _, _ = torch.batch_norm_backward_reduce(
            grad.contiguous(), values.contiguous(), mean, scale, None, True, False, False
        )
        return products * scale, totals
    # Plain batch normalisation with given statistics has the same gradients of parameters.
    _, products, totals = torch.ops.aten.native_batch_norm_backward(
        grad, values, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return products, totals


def _working_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _as(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(dtype)
