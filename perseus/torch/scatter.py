"""Collectives that combine values and leave each rank a part: reducescatter, plain and grouped.

Conventions, errors and dtypes are those of perseus.torch.reductions; op is Average or Sum.
Source of behaviour: Horovod 0.28.1, horovod.torch.mpi_ops.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from perseus.errors import HorovodInternalError
from perseus.process_sets import ProcessSet, global_process_set, number_of
from perseus.torch.compression import Compression, Compressor
from perseus.torch.data_movement import allgather, grouped_allgather
from perseus.torch.reductions import group_members
from perseus.torch.session import (
    REDUCESCATTER,
    Average,
    Sum,
    place,
    session,
    synchronize,
    wants_grad,
)
from perseus.torch.untraced import untraced


def _scattered(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Room for this rank's rows: dim0 // size, and one more for the low ranks of the remainder."""
    if tensor.dim() == 0:
        return torch.empty_like(tensor)  # refused on every rank in one message, by the core
    rows, rest = divmod(tensor.shape[0], size)
    return tensor.new_empty((rows + (rank < rest), *tensor.shape[1:]))


def _check_scatter_op(op: int) -> None:
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter only supports AVERAGE and SUM")


@untraced
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing a tensor and giving each rank a part of its rows; returns a handle.

    tensor: contiguous, equal shapes, at least one dimension. Of the d rows rank r of n gets d // n,
    plus one if r < d % n, so possibly none. op: Average or Sum.
    """
    _check_scatter_op(op)
    output = _scattered(tensor, *place(process_set))
    return session.submit(
        REDUCESCATTER, name, tensor, output, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction over all ranks. Differentiable; see reducescatter_async."""
    tensor, context = compression.compress(tensor)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if wants_grad(tensor):
        output = HorovodReducescatter.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
    else:
        output = session.synchronize(reducescatter_async(tensor, *arguments))
    result: torch.Tensor = compression.decompress(output, context)
    return result


@untraced
def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducescatter of several tensors as one operation; returns one handle."""
    _check_scatter_op(op)
    members = group_members(tensors)
    rank, size = place(process_set)
    outputs = tuple(_scattered(tensor, rank, size) for tensor in members)
    return session.submit(
        REDUCESCATTER, name, members, outputs, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """This rank's rows of the reductions of several tensors as one operation. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in group_members(tensors)]
    members = [tensor for tensor, _ in pairs]
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if wants_grad(*members):
        outputs = HorovodGroupedReducescatter.apply(*arguments, *members)  # type: ignore[no-untyped-call]
    else:
        outputs = session.synchronize(grouped_reducescatter_async(members, *arguments))
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, pairs, strict=True)
    ]


def _gathered_scale(
    op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float
) -> float:
    """What reducescatter's gradient is multiplied by before it is gathered."""
    size = place(process_set)[1] if op == Sum else 1
    return size * prescale_factor * postscale_factor


class HorovodReducescatter(torch.autograd.Function):
    """reducescatter as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        """Reduce and scatter; remember how."""
        ctx.arguments = (op, process_set, prescale_factor, postscale_factor)
        result: torch.Tensor = synchronize(reducescatter_async(tensor, name, *ctx.arguments))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gather the scaled gradient."""
        scaled = grads[0] * _gathered_scale(*ctx.arguments)
        process_set = ctx.arguments[1]
        gathered = allgather(scaled.contiguous(), process_set=process_set)
        return gathered, None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """grouped_reducescatter as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Reduce and scatter; remember how."""
        ctx.arguments = (op, process_set, prescale_factor, postscale_factor)
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, *ctx.arguments)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gather the scaled gradients."""
        scale = _gathered_scale(*ctx.arguments)
        process_set = ctx.arguments[1]
        scaled = [(grad * scale).contiguous() for grad in grads]
        return None, None, None, None, None, *grouped_allgather(scaled, process_set=process_set)
