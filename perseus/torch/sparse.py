"""Reduces sparse tensors over all ranks by gathering their indices and values. Stateless.

Source of behaviour: Horovod 0.28.1, horovod.torch.mpi_ops.sparse_allreduce_async.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from perseus.compression import Compressor, NoneCompressor
from perseus.errors import MismatchError
from perseus.failures import Failures
from perseus.process_sets import ProcessSet, global_process_set
from perseus.torch.data_movement import allgather_async
from perseus.torch.session import ALLGATHER, Average, Sum, place, session, synchronize
from perseus.torch.untraced import untraced

_HALVES = (torch.float16, torch.bfloat16)


@untraced
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start reducing a sparse tensor over all ranks; returns a function that waits for the result.

    tensor: COO layout, equal sizes and dtypes on all ranks; any number of entries, also none.
    name: its indices travel as `<name>.indices`, its values as `<name>.values`. op: Average or Sum;
        averages of integers truncate.
    The function returns a new coalesced tensor, equal on all ranks; call it once.

    Raises ValueError for another layout and for averages of bools, NotImplementedError for other
    ops, before anything is started; the function raises MismatchError on every rank where sizes or
    dtypes differ.
    """
    finish = start_sparse_allreduce(tensor, name, op, process_set, NoneCompressor)
    return cast(Callable[[], torch.Tensor], finish)  # None is for gradients


def empty_like(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """Return a sparse tensor without entries, with a dense tensor's shape and dtype."""
    return torch.sparse_coo_tensor(
        torch.empty(sparse_dims, 0, dtype=torch.int64, device=parameter.device),
        torch.empty(
            0, *parameter.shape[sparse_dims:], dtype=parameter.dtype, device=parameter.device
        ),
        parameter.shape,
        check_invariants=False,
    )


def start_sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    compression: type[Compressor],
    *,
    gradient_of: int = 0,
) -> Callable[[], torch.Tensor | None]:
    """Start like sparse_allreduce_async(), but with compressed values, which are then added in the
    tensor's dtype.

    gradient_of: the number of the reducer whose gradient it is; 0 = no gradient. The returned
        function returns None if all ranks skip the gradient because of a NaN.
    """
    if tensor.layout != torch.sparse_coo:
        raise ValueError(
            f"[torch] expected a sparse tensor in COO layout, got {tensor.layout}; "
            f"use allreduce for dense tensors"
        )
    if op not in (Average, Sum):
        raise NotImplementedError(
            "[torch] sparse tensors can be reduced with op=Average or op=Sum only; make it dense "
            "with .to_dense() or sparse_as_dense=True"
        )
    if op == Average and tensor.dtype == torch.bool:
        raise ValueError("Average is not defined for bool tensors: use op=Sum (or).")
    own = tensor.detach().coalesce()
    size = place(process_set)[1]
    values, context = compression.compress(own.values())
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    if not values.is_floating_point():  # a user's own compression may change them
        gradient_of = 0
    # The values first: only they may have a dtype that is refused, and then nothing has begun.
    in_values = session.submit(
        ALLGATHER, names[1], values.contiguous(), group=process_set.process_set_id,
        gradient_of=gradient_of,
    )  # fmt: skip
    wait = _both((allgather_async(header_and_indices(own), names[0], process_set), in_values))

    @untraced
    def finish() -> torch.Tensor | None:
        described, gathered = wait()
        if gathered is None:
            return None
        gathered = compression.decompress(gathered, context)
        return sparse_total(described, gathered, own, op, size)

    return finish


def _both(handles: tuple[int, int]) -> Callable[[], list[Any]]:
    """Return a function that waits for two operations and returns their results.

    If one fails, it raises after both have ended. If it is interrupted, it can be called again.
    """
    left, outcomes, failures = list(handles), [], Failures()

    def wait() -> list[Any]:
        while left:
            try:
                outcomes.append(synchronize(left[0]))
            except Exception as error:
                failures.add(error)
            del left[0]
        failures.raise_first()
        return outcomes

    return wait


def sparse_total(
    described: torch.Tensor, gathered: torch.Tensor, own: torch.Tensor, op: int, size: int
) -> torch.Tensor:
    """Return the Sum or Average of all ranks' sparse tensors, coalesced, in the dtype of `own`.

    described: what header_and_indices() returns on each rank, gathered. gathered: their values.
    own: this rank's tensor. size: the number of ranks.

    Raises MismatchError if ranks disagree about sizes or sparse dimensions.
    """
    if own.dtype in _HALVES:  # entries of one index are added in float32 and rounded once
        gathered = gathered.to(torch.float32)
    indices = _joined_indices(described, own)
    total = torch.sparse_coo_tensor(indices, gathered, own.shape, check_invariants=False).coalesce()
    if op == Average:
        rounding = None if total.is_floating_point() else "trunc"
        total = torch.div(total, size, rounding_mode=rounding)
    return total.to(own.dtype)


def header_and_indices(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 [entries, dimensions, sparse dimensions, sizes…, indices by entry…]."""
    sizes = [tensor._nnz(), tensor.dim(), tensor.sparse_dim(), *tensor.shape]
    header = torch.tensor(sizes, device=tensor.device)
    return torch.cat([header, tensor.indices().t().reshape(-1)])


def _joined_indices(described: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the indices of all ranks, concatenated to shape (sparse dimensions, entries).

    Raises MismatchError if ranks disagree about sizes or sparse dimensions.
    """
    parts = []
    start = 0
    while start < described.numel():
        entries, dimensions, sparse = described[start : start + 3].tolist()
        start += 3
        shape = described[start : start + dimensions].tolist()
        start += dimensions
        if shape != list(own.shape) or sparse != own.sparse_dim():
            raise MismatchError(
                f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape "
                f"{list(own.shape)}, but another rank sent a tensor of shape {shape}. [torch] "
                f"sparse dimensions: {own.sparse_dim()} against {sparse}"
            )
        parts.append(described[start : start + entries * sparse].view(entries, sparse))
        start += entries * sparse
    return torch.cat(parts).t()
