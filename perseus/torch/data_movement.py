"""Collectives that move values: allgather, broadcast, alltoall; barrier and join.

Conventions, errors and dtypes are those of perseus.torch.reductions, with bool everywhere. Results
of allgather and alltoall are tensors on memory that the core allocated: nothing is copied.
Source of behaviour: Horovod 0.28.1, horovod.torch.mpi_ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from perseus import basics
from perseus.gradients import parameter_check
from perseus.gradients.rotation import restart_turns
from perseus.process_sets import ProcessSet, global_process_set, number_of
from perseus.torch.reductions import allreduce
from perseus.torch.session import (
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    Average,
    place,
    session,
    splits_devices,
    synchronize,
    wants_grad,
)
from perseus.torch.untraced import untraced


def _average(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """The mean over all ranks, for gradients; differentiable once more."""
    return allreduce(tensor.contiguous(), op=Average, process_set=process_set)


# ---- allgather ----------------------------------------------------------------------------------


@untraced
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start joining the tensors of all ranks along dimension 0, in rank order; returns a handle.

    tensor: contiguous, at least one dimension; only the first may differ across ranks, and be 0.
    """
    return session.submit(ALLGATHER, name, tensor, group=number_of(process_set))


@untraced
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks joined along dimension 0, identical on every rank. Differentiable.

    IndexError for a tensor without dimensions. See allgather_async.
    """
    differentiable = wants_grad(tensor)
    if tensor.dim() == 0:
        raise IndexError("[torch] allgather joins along dimension 0, which a scalar does not have")
    if differentiable:
        gathered: torch.Tensor = HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    else:
        gathered = session.synchronize(allgather_async(tensor, name, process_set))
    return gathered


@untraced
def grouped_allgather_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start allgather of several tensors as one operation; returns one handle."""
    members = tuple(tensors)
    if not members:
        raise ValueError("[torch] a grouped operation needs at least one tensor, got none")
    return session.submit(ALLGATHER, name, members, group=number_of(process_set))


@untraced
def grouped_allgather(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """allgather of several tensors as one operation. Differentiable."""
    members = tuple(tensors)
    if wants_grad(*members):
        return list(HorovodGroupedAllgather.apply(name, process_set, *members))  # type: ignore[no-untyped-call]
    return list(session.synchronize(grouped_allgather_async(members, name, process_set)))


def _own_slice(grad: torch.Tensor, rows: int, first: int, process_set: ProcessSet) -> torch.Tensor:
    """This rank's rows of the averaged gradient of an allgather."""
    return _average(grad, process_set).narrow(0, first, rows)


def _offsets(rows: Sequence[int], process_set: ProcessSet) -> list[int]:
    """Where this rank's rows of each tensor begin."""
    rank, size = place(process_set)
    counts = allgather(torch.tensor([rows], dtype=torch.int64), process_set=process_set)
    if counts.shape[0] != size:
        raise RuntimeError(f"[torch] {counts.shape[0]} ranks took part, expected {size}")
    offsets: list[int] = counts[:rank].sum(dim=0).tolist()
    return offsets


class HorovodAllgather(torch.autograd.Function):
    """allgather as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Gather; remember this rank's share."""
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        gathered: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Average the gradient over all ranks and cut out this rank's rows."""
        first = _offsets([ctx.rows], ctx.process_set)[0]
        return _own_slice(grads[0], ctx.rows, first, ctx.process_set), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """grouped_allgather as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather; remember this rank's shares."""
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Average the gradients over all ranks and cut out this rank's rows."""
        offsets = _offsets(ctx.rows, ctx.process_set)
        slices = [
            _own_slice(grad, rows, first, ctx.process_set)
            for grad, rows, first in zip(grads, ctx.rows, offsets, strict=True)
        ]
        return None, None, *slices


# ---- broadcast ----------------------------------------------------------------------------------


@untraced
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start overwriting a tensor with the root's; returns a handle.

    root_rank: a global rank, also inside a process set. tensor: equal shape and dtype on all ranks.
    """
    return session.submit(
        BROADCAST, name, tensor, tensor, root=root_rank, group=number_of(process_set)
    )


@untraced
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start copying the root's tensor into a new one; returns a handle. See broadcast_async_."""
    return session.submit(
        BROADCAST, name, tensor, torch.empty_like(tensor), root=root_rank,
        group=number_of(process_set),
    )  # fmt: skip


@untraced
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A copy of the root's tensor. Differentiable: the root gets the averaged gradient."""
    if wants_grad(tensor):
        copied: torch.Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    else:
        copied = session.synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return copied


@untraced
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite a tensor with the root's and return it. Not differentiable."""
    handle = broadcast_async_(tensor, root_rank, name, process_set)
    overwritten: torch.Tensor = session.synchronize(handle)
    return overwritten


class HorovodBroadcast(torch.autograd.Function):
    """broadcast as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcast; remember the root."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        copied: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return copied

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The averaged gradient on the root, zeros elsewhere: their input was not used."""
        mean = _average(grads[0], ctx.process_set)
        if basics.rank() != ctx.root_rank:
            # Stays in the graph: where gradients are differentiated again, all ranks take part.
            hidden = torch.ones((), dtype=torch.bool, device=mean.device)
            mean = mean.masked_fill(hidden, 0.0)
        return mean, None, None, None


# ---- alltoall -----------------------------------------------------------------------------------


def _checked_splits(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Rows for each rank of the set as a list; ValueError where they do not fit the tensor."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if tensor.dim() and rows % size != 0:
            raise ValueError(
                f"[torch] alltoall: the first dimension ({rows}) is not an even multiple of the "
                f"number of workers ({size}); pass splits"
            )
        return [rows // size] * size
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits)
    if given.dim() != 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    # A list or array has no say in how wide its numbers are.
    whole = not (given.is_floating_point() or given.is_complex()) or given.numel() == 0
    if given.dtype != torch.int32 and (given is splits or not whole):
        raise ValueError("alltoall expects splits to contain 32-bit integer elements")
    values: list[int] = given.tolist()
    if len(values) != size:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers: {len(values)} against "
            f"{size}"
        )
    if any(value < 0 for value in values):
        raise ValueError(f"[torch] alltoall: splits must not be negative, got {values}")
    if sum(values) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of the tensor: "
            f"{sum(values)} against {rows}"
        )
    return values


@untraced
def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start sending each rank a part of the rows and joining what comes; returns a handle.

    tensor: contiguous; dimensions after the first are equal on all ranks.
    splits: int32 rows for each rank (list, array or 1-D tensor); their sum may be less than the
    first dimension, the tail is not sent. None: equal parts.
    synchronize returns the rows in rank order; with splits (output, received_splits), the latter
    an int32 tensor of the rows that came from each rank, on the device of `splits` if that is a
    tensor. ValueError for splits that do not fit.
    """
    values = _checked_splits(tensor, splits, place(process_set)[1])
    handle = session.submit(
        ALLTOALL, name, tensor, splits=None if splits is None else values,
        group=number_of(process_set),
    )  # fmt: skip
    if isinstance(splits, torch.Tensor) and splits.device.type != "cpu":
        splits_devices[handle] = splits.device
    return handle


@untraced
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank a part of the rows and join what comes; see alltoall_async. Differentiable.

    Returns the output, with splits (output, received_splits).
    """
    if wants_grad(tensor):
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
        return output if splits is None else (output, received)
    return synchronize(alltoall_async(tensor, splits, name, process_set))


class HorovodAlltoall(torch.autograd.Function):
    """alltoall as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange; remember where rows came from."""
        rank_splits = _checked_splits(tensor, splits, place(process_set)[1])
        output, received = synchronize(alltoall_async(tensor, rank_splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        if isinstance(splits, torch.Tensor):
            received = received.to(splits.device)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Send the gradient back where the rows came from; rows that were not sent get zeros."""
        grad = grads[0].contiguous()
        returned, _ = alltoall(grad, ctx.received, process_set=ctx.process_set)
        if returned.shape[0] < ctx.rows:
            rest = returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, rest])
        return returned, None, None, None


# ---- barrier, join ------------------------------------------------------------------------------


@untraced
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set is here. Operations still pending are not affected."""
    session.synchronize(
        session.submit(BARRIER, "barrier.noname", None, group=number_of(process_set))
    )


@untraced
def join(device: int = -1) -> int:
    """Say that this rank has no more data; returns once all ranks have said so.

    Until then it gives zeros to every allreduce of the others, so that ranks may do different
    numbers of steps (Average still divides by the number of all ranks). Other collectives of theirs
    fail with MismatchError meanwhile, but for barrier. Asynchronous operations that this rank has
    under way are finished. Members of other process sets wait for this rank as before.

    device: of the zeros; any value, as they lie in host memory.
    Returns the rank that joined last, the same on every rank: its model has seen most data.
    """
    del device
    last: int = session.synchronize(session.submit(JOIN, "join.noname", None))
    parameter_check.restart_all()
    restart_turns()
    return last
