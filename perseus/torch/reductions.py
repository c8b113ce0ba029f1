"""Collectives that combine values: allreduce, plain and grouped.

Asynchronous forms return a handle (an int) for poll and synchronize; those ending in `_` work in
place. Common arguments:

name: pairs the operation across ranks, in whatever order they submit it; the same name may not be
    in flight twice. None: `noname.<n>`, for which all ranks must issue the same operations.
op: Average, Sum, Min, Max, Product or Adasum.
prescale_factor, postscale_factor: multiplied in before and after; integers truncate towards zero.
process_set: the ranks that take part.

dtypes: float16, bfloat16, float32, float64, (u)int8, int16, int32, int64; sums of integers wrap
    around as PyTorch's do, before Average divides. bool without Average and factors: Sum and Max
    are or, Min and Product are and.
Errors: ValueError for a dtype or layout that cannot be served, a name in flight, a foreign process
set; HorovodInternalError (MismatchError) on every rank where shapes, dtypes or arguments differ.
Source of behaviour: Horovod 0.28.1, horovod.torch.mpi_ops.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from perseus.arguments import checked_compression
from perseus.compat.common.extensions import get_average_backwards_compatibility_fun
from perseus.compression import EXACT, applied_here, castable
from perseus.process_sets import ProcessSet, global_process_set, number_of
from perseus.torch import session as session_module
from perseus.torch.compression import Compression, Compressor
from perseus.torch.session import (
    ALLREDUCE,
    Average,
    Sum,
    session,
    synchronize,
    wants_grad,
)
from perseus.torch.untraced import untraced

_resolve_op = get_average_backwards_compatibility_fun(session_module)


@untraced
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over all ranks in place; returns a handle.

    tensor: any shape, equal on all ranks; dense in any memory format (channels_last). It must not
    be touched until synchronize. average is Horovod's deprecated form of op. The rest: see module.
    """
    if op is None or average is not None:
        op = _resolve_op(op, average)
    return session.submit(
        ALLREDUCE, name, tensor, tensor, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over all ranks into a new one; returns a handle.

    tensor: as for allreduce_async_; it is only read. The result has its shape, dtype and layout.
    """
    if op is None or average is not None:
        op = _resolve_op(op, average)
    return session.submit(
        ALLREDUCE, name, tensor, torch.empty_like(tensor), op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of a tensor over all ranks, as a new tensor.

    Differentiable: the gradient is an allreduce with the same arguments. compression applies to
    what is sent. See allreduce_async and the module.
    """
    if op is None or average is not None:
        op = _resolve_op(op, average)
    compression = castable(checked_compression(compression, "torch"), op in (Average, Sum))
    codec = _codec(compression, name)
    compression = applied_here(compression)
    tensor, context = compression.compress(tensor)
    arguments = (name, op, prescale_factor, postscale_factor, process_set, codec)
    if wants_grad(tensor):
        output = HorovodAllreduce.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
    else:
        output = session.synchronize(_start(tensor, torch.empty_like(tensor), *arguments))
    result: torch.Tensor = compression.decompress(output, context)
    return result


def _start(
    sent: torch.Tensor | tuple[torch.Tensor, ...],
    output: torch.Tensor | tuple[torch.Tensor, ...],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    codec: tuple[int, float],
) -> int:
    return session.submit(
        ALLREDUCE, name, sent, output, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set), codec=codec[0],
        codec_argument=codec[1],
    )  # fmt: skip


def _codec(compression: type[Compressor], name: str | None) -> tuple[int, float]:
    if compression.stateful and name is None:
        raise ValueError(
            f"[torch] {compression.__name__} keeps what it holds back under the tensor's name: "
            "pass name=, the same one every time"
        )
    return compression.codec, compression.argument


@untraced
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place and return it. Not differentiable."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: torch.Tensor = session.synchronize(handle)
    return result


class HorovodAllreduce(torch.autograd.Function):
    """allreduce as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        codec: tuple[int, float] = (EXACT, 0.0),
    ) -> torch.Tensor:
        """Reduce; remember how."""
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        output = torch.empty_like(tensor)
        how = (op, prescale_factor, postscale_factor, process_set, codec)
        result: torch.Tensor = synchronize(_start(tensor, output, name, *how))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Reduce the gradient in the same way."""
        op, prescale, postscale, process_set = ctx.arguments
        reduced = allreduce(
            grads[0].contiguous(),
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return reduced, None, None, None, None, None, None


# ---- grouped allreduce --------------------------------------------------------------------------


def group_members(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    members = tuple(tensors)
    if not members:
        raise ValueError("[torch] a grouped operation needs at least one tensor, got none")
    return members


@untraced
def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors in place as one operation; returns one handle.

    They are executed together once all of them are ready on all ranks, under the names
    `<name>_<i>of<n>`. dtypes may differ. ValueError if their memory overlaps.
    """
    members = group_members(tensors)
    if op is None or average is not None:
        op = _resolve_op(op, average)
    return session.submit(
        ALLREDUCE, name, members, members, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors into new ones as one operation; returns one handle."""
    members = group_members(tensors)
    if op is None or average is not None:
        op = _resolve_op(op, average)
    outputs = tuple(torch.empty_like(tensor) for tensor in members)
    return session.submit(
        ALLREDUCE, name, members, outputs, op=op, prescale=prescale_factor,
        postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


@untraced
def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The reductions of several tensors as one operation, as new tensors. Differentiable."""
    if op is None or average is not None:
        op = _resolve_op(op, average)
    compression = castable(checked_compression(compression, "torch"), op in (Average, Sum))
    codec = _codec(compression, name)
    compression = applied_here(compression)
    pairs = [compression.compress(tensor) for tensor in group_members(tensors)]
    members = tuple(tensor for tensor, _ in pairs)
    arguments = (name, op, prescale_factor, postscale_factor, process_set, codec)
    if wants_grad(*members):
        outputs = HorovodGroupedAllreduce.apply(*arguments, *members)  # type: ignore[no-untyped-call]
    else:
        results = tuple(torch.empty_like(tensor) for tensor in members)
        outputs = session.synchronize(_start(members, results, *arguments))
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, pairs, strict=True)
    ]


@untraced
def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place as one operation and return them. Not differentiable."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return list(session.synchronize(handle))


class HorovodGroupedAllreduce(torch.autograd.Function):
    """grouped_allreduce as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        codec: tuple[int, float],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Reduce; remember how."""
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        outputs = tuple(torch.empty_like(tensor) for tensor in tensors)
        handle = _start(
            tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, codec
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Reduce the gradients in the same way."""
        op, prescale, postscale, process_set = ctx.arguments
        reduced = grouped_allreduce(
            [grad.contiguous() for grad in grads],
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return None, None, None, None, None, None, *reduced
