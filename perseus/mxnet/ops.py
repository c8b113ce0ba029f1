"""The collectives as ops on MXNet's engine, on which everything else in perseus.mxnet is built.

arrays: mx.nd.NDArray or mx.np.ndarray, dense; lists of them. Those on a GPU are copied to the host
    and back.
name: matches an op across ranks, which may run ops in any order. None: a number, for which all
    ranks must call the same unnamed ops in the same order.
grouped: one op for all arrays, which are ready, executed and finished together; else there is one.
priority: the engine's and the core's; of ready ops, the highest runs first.
process_set: the ranks that take part.

Results of known shapes are returned at once and filled later, in the engine's order; allgather and
alltoall wait for theirs. dtypes: float16, bfloat16, float32, float64, uint8, int8,
int32, int64, bool.
Errors: ValueError for arguments and arrays that cannot be served. MXNetError at the next wait for
an output, or from a call that waits itself: on every rank if ranks disagree about a tensor (the job
goes on); if the world has broken or was shut down; and for requests that the core refuses. Without
init() the call itself raises it.
Source of behaviour: Horovod 0.28.1, horovod.mxnet.mpi_ops.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from perseus.arguments import checked_op, checked_root
from perseus.mxnet import staging
from perseus.mxnet.library import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    Batch,
    Op,
    gather,
    handles,
    mxnet,
)
from perseus.operations import ReduceOp
from perseus.process_sets import ProcessSet, global_process_set, group_id

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def check_array(array: Any) -> None:
    """ValueError for an array that no collective can take."""
    if not isinstance(array, mxnet.nd.NDArray):
        raise ValueError(f"[mxnet] expected mx.nd.NDArray or mx.np.ndarray, got {type(array)}")
    if array.stype != "default":
        raise ValueError(
            f"[mxnet] an array of storage type {array.stype} has to be made dense first: "
            f"array.tostype('default')"
        )


def empty(like: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new array of the class, context, dtype and (unless given) shape of another one."""
    if not isinstance(like, mxnet.nd.NDArray):
        check_array(like)
    return staging.empty(like, shape)


def _op(kind: int, arrays: Sequence[Any], name: str | None, grouped: bool, group: ProcessSet) -> Op:
    for array in arrays:
        check_array(array)
    made = Op(kind=kind, grouped=grouped, group=group_id(group), prescale=1.0, postscale=1.0)
    made.name = None if name is None else str(name).encode()
    made.staging = staging.Staging(arrays)
    made.inputs = ctypes.addressof(inputs := handles(made.staging.inputs))
    made.count = len(arrays)
    made.kept = [inputs]
    return made


def _into(op: Op, outputs: Sequence[Any]) -> Op:
    op.outputs = ctypes.addressof(given := handles(op.staging.outputs(outputs)))
    op.kept.append(given)
    return op


def reduction(
    arrays: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None = None,
    *,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
) -> Op:
    """An allreduce that has not been pushed yet."""
    made = _op(ALLREDUCE, arrays, name, grouped, process_set)
    made.op = checked_op(op, "mxnet")
    made.prescale, made.postscale, made.priority = prescale, postscale, priority
    return _into(made, outputs)


def allreduce(arrays: Sequence[Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Reduce each array over all ranks into an output of its shape, which may be the same one.

    The other arguments are those of reduction(). op: Average, Sum, Min, Max, Product or Adasum;
    integers truncate towards zero. prescale, postscale: multiplied in before and after.
    """
    Batch([reduction(arrays, outputs, *args, **kwargs)]).push()


def broadcast(
    arrays: Sequence[Any],
    outputs: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    *,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
) -> None:
    """Copy the root's arrays into outputs of their shape, which may be the same ones.

    root_rank: a global rank, also inside a process set.
    """
    made = _op(BROADCAST, arrays, name, grouped, process_set)
    made.root, made.priority = checked_root(root_rank, "mxnet"), priority
    Batch([_into(made, outputs)]).push()


def reducescatter(
    arrays: Sequence[Any],
    name: str | None = None,
    *,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
) -> list[Any]:
    """This rank's rows of each reduction: of d rows rank r of n gets d // n, plus 1 if r < d % n.

    op: Average or Sum. At least one dimension; ValueError.
    """
    if checked_op(op, "mxnet") not in (Average, Sum):
        raise ValueError("[mxnet] Reducescatter only supports AVERAGE and SUM")
    made = _op(REDUCESCATTER, arrays, name, grouped, process_set)
    made.op, made.prescale, made.postscale, made.priority = op, prescale, postscale, priority
    size, rank = process_set.size() or 1, process_set.rank() or 0
    outputs = []
    for array in arrays:
        if not array.shape:
            raise ValueError("[mxnet] reducescatter divides dimension 0, which a scalar lacks")
        rows = array.shape[0] // size + (rank < array.shape[0] % size)
        outputs.append(empty(array, (rows, *array.shape[1:])))
    Batch([_into(made, outputs)]).push()
    return outputs


def allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    *,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
    gradient_of: int = 0,
) -> list[Any]:
    """Join the arrays of all ranks along dimension 0, in rank order; waits.

    Only the first dimension may differ across ranks, and be 0. gradient_of: see perseus_request.
    """
    made = _op(ALLGATHER, arrays, name, grouped, process_set)
    made.priority, made.gradient_of = priority, gradient_of
    return _gathered(made, arrays)[0]


def alltoall(
    array: Any,
    splits: Sequence[int] | None,
    name: str | None = None,
    *,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, tuple[int, ...]]:
    """Send each rank a part of the rows and join what comes: (output, received rows); waits.

    splits: rows for each rank of the set; their sum may be less than the first dimension, the tail
    is not sent. None: equal parts.
    """
    made = _op(ALLTOALL, [array], name, False, process_set)
    made.priority = priority
    if splits is not None:
        rows = (ctypes.c_int64 * max(len(splits), 1))(*splits)
        made.splits, made.split_count = ctypes.addressof(rows), len(splits)
        made.kept.append(rows)
    outputs, received = _gathered(made, [array])
    return outputs[0], received


def _gathered(op: Op, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """The results as new arrays, and how many rows came from each rank."""
    op.staging.load()
    results = gather(op, op.staging.inputs)
    outputs = []
    for index, (array, here) in enumerate(zip(arrays, op.staging.inputs, strict=True)):
        output = empty(here, results.shape(index))
        results.copy(index, output)
        outputs.append(output if here is array else staging.moved(output, array))
    return outputs, results.received_splits()
