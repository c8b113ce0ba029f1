"""Horovod's module of collectives, `horovod.tensorflow.mpi_ops`: one place with all of their names.

Each takes one tensor (or, if grouped, a list); the rest is as in perseus.tensorflow.ops.
Thread-safe.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

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
    gpu_available,
    num_rank_is_power_2,
)
from perseus.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from perseus.tensorflow import autodiff as _autodiff  # noqa: F401 - registers them
from perseus.tensorflow import ops
from perseus.tensorflow.library import native
from perseus.tensorflow.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    size_op,
)

__all__ = [
    "MPI_LIB",
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_installed_version",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "process_set_included_op",
    "rank",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

# Horovod's own tests look inside.
_basics = HorovodBasics()
MPI_LIB = native
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
check_num_rank_power_of_2 = num_rank_is_power_2
_normalize_name = ops.normalize_name


def rank_op(name: str | None = None) -> Any:
    """This process's rank in the world when the op runs, an int32 scalar."""
    return ops.rank_op(name=name)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The reduction of a dense tensor over all ranks. Differentiable."""
    results, _ = ops.allreduce(
        [tensor],
        name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )
    return results[0]


def _grouped_allreduce(
    tensors: Iterable[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The reductions of several dense tensors, as one operation. Differentiable."""
    results, _ = ops.allreduce(
        tensors,
        name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        grouped=True,
        ignore_name_scope=ignore_name_scope,
    )
    return results


def _laid_out(tensor: Any) -> Any:
    """The tensor for allgather: with a new first dimension if PERSEUS_CHANGE_HVD_ALLGATHER is 0."""
    return tf.expand_dims(tensor, 0) if basics.stacks_gathered() else tensor


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensors of all ranks joined along dimension 0, which alone may differ. Differentiable."""
    return ops.allgather(
        [_laid_out(tensor)], name, process_set=process_set, ignore_name_scope=ignore_name_scope
    )[0]


def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """allgather of several tensors as one operation. Differentiable."""
    return ops.allgather(
        list(map(_laid_out, tensors)),
        name,
        process_set=process_set,
        grouped=True,
        ignore_name_scope=ignore_name_scope,
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A copy of the root's tensor; root_rank is a global rank. Differentiable."""
    return ops.broadcast(
        [tensor], root_rank, name, process_set=process_set, ignore_name_scope=ignore_name_scope
    )[0]


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with the root's, as one operation; returns their new values.

    The root's values go to a tensor first, from which they are assigned. Not differentiable.
    """
    return ops.broadcast_(variables, root_rank, name, process_set=process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank a part of the rows and join what comes. Differentiable.

    splits: int32 rows for each rank; None: equal parts. Returns the output, with splits (output,
    received_splits).
    """
    output, received = ops.alltoall(
        tensor, splits, name, process_set=process_set, ignore_name_scope=ignore_name_scope
    )
    return output if splits is None else (output, received)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction of a dense tensor. Differentiable."""
    return ops.reducescatter(
        [tensor],
        name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )[0]


def _grouped_reducescatter(
    tensors: Iterable[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """_reducescatter of several tensors as one operation. Differentiable."""
    return ops.reducescatter(
        tensors,
        name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        grouped=True,
        ignore_name_scope=ignore_name_scope,
    )
