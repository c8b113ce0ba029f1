"""Horovod's module of collectives, `horovod.mxnet.mpi_ops`: one place with all of their names.

Each takes one array (or, if grouped, a list); the rest, and errors, are as in perseus.mxnet.ops.
Common arguments:

average: Horovod's deprecated form of op. op: Average (if neither is given), Sum, Min, Max, Product
    or Adasum.
name, priority, process_set: see there.
prescale_factor, postscale_factor: multiplied in before and after; integers truncate towards zero.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perseus import basics
from perseus.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from perseus.compat.common.basics import HorovodBasics
from perseus.compat.common.extensions import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
)
from perseus.mxnet import ops
from perseus.mxnet.library import mxnet as mx
from perseus.mxnet.library import native as MPI_MXNET_LIB_CTYPES
from perseus.mxnet.library import path as dll_path
from perseus.mxnet.ops import Adasum, Average, Max, Min, Product, Sum
from perseus.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "MPI_MXNET_LIB_CTYPES",
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_installed_version",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "dll_path",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# Horovod's own tests look inside.
_basics = HorovodBasics()
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


def _reduced(
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None,
    op: int,
    priority: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> None:
    ops.allreduce(
        tensors, outputs, name, op=op, prescale=factors[0], postscale=factors[1],
        priority=priority, process_set=process_set, grouped=grouped,
    )  # fmt: skip


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """The reduction of an array over all ranks, as a new array. Does not wait."""
    op = handle_average_backwards_compatibility(op, average)
    output = ops.empty(tensor)
    factors = prescale_factor, postscale_factor
    _reduced([tensor], [output], name, op, priority, factors, process_set)
    return output


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """Overwrite an array with its reduction over all ranks; returns it. Does not wait."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    _reduced([tensor], [tensor], name, op, priority, factors, process_set)
    return tensor


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """allreduce of several arrays as one operation; an empty list is returned as it is."""
    tensors = list(tensors)
    op = handle_average_backwards_compatibility(op, average)
    if not tensors:
        return tensors
    outputs = [ops.empty(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    _reduced(tensors, outputs, name, op, priority, factors, process_set, True)
    return outputs


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[Any]:
    """allreduce_ of several arrays, each given once, as one operation; returns them."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    if tensors:
        _reduced(tensors, tensors, name, op, priority, factors, process_set, True)
    return tensors


def _laid_out(tensor: Any) -> Any:
    """The array for allgather: with a new first dimension if PERSEUS_CHANGE_HVD_ALLGATHER is 0."""
    return tensor.expand_dims(0) if basics.stacks_gathered() else tensor


def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The arrays of all ranks joined along dimension 0, which alone may differ. Waits."""
    return ops.allgather([_laid_out(tensor)], name, priority=priority, process_set=process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """allgather of several arrays as one operation; an empty list is returned as it is."""
    tensors = [_laid_out(tensor) for tensor in tensors]
    if not tensors:
        return tensors
    return ops.allgather(tensors, name, priority=priority, process_set=process_set, grouped=True)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A copy of the root's array; root_rank is a global rank. Does not wait."""
    output = ops.empty(tensor)
    ops.broadcast([tensor], [output], root_rank, name, priority=priority, process_set=process_set)
    return output


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an array with the root's; returns it. Does not wait."""
    ops.broadcast([tensor], [tensor], root_rank, name, priority=priority, process_set=process_set)
    return tensor


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank a part of the rows and join what comes. Waits.

    splits: rows for each rank, int32 if it is an array; None: equal parts. Returns the output, with
    splits (output, received_splits), the latter an int32 array.
    """
    rows = None if splits is None else _rows(splits)
    output, received = ops.alltoall(tensor, rows, name, priority=priority, process_set=process_set)
    if splits is None:
        return output
    make = mx.np.array if isinstance(tensor, mx.np.ndarray) else mx.nd.array
    return output, make(received, dtype="int32")


def _rows(splits: Any) -> list[int]:
    """Splits as integers; ValueError for fractions and for more than one dimension."""
    is_array = isinstance(splits, mx.nd.NDArray)
    given = splits if is_array else np.asarray(splits)
    if given.ndim != 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    values = splits.asnumpy() if is_array else given.astype(np.int64)
    # A list has no say in how wide its numbers are.
    if given.dtype != np.int32 if is_array else (values != given).any():
        raise ValueError("alltoall expects splits to contain 32-bit integer elements")
    rows: list[int] = values.tolist()
    return rows


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction over all ranks; op Average or Sum. Does not wait."""
    return ops.reducescatter(
        [tensor], name, op=op, prescale=prescale_factor, postscale=postscale_factor,
        priority=priority, process_set=process_set,
    )[0]  # fmt: skip


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """reducescatter of several arrays as one operation; an empty list is returned as it is."""
    if not tensors:
        return list(tensors)
    return ops.reducescatter(
        tensors, name, op=op, prescale=prescale_factor, postscale=postscale_factor,
        priority=priority, process_set=process_set, grouped=True,
    )  # fmt: skip
