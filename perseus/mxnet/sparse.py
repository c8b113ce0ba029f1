"""Sums row-sparse gradients over the devices of a rank and over all ranks. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from perseus.mxnet import ops
from perseus.process_sets import ProcessSet, global_process_set


def sum_rows(
    arrays: Sequence[Any],
    name: str,
    priority: int,
    gradient_of: int,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the sum as a new RowSparseNDArray with the rows that any rank has.

    All ranks get the same bits.

    arrays: RowSparseNDArrays of one shape and dtype, one for each of this rank's devices; the sum
        is on the CPU. Rows are added in the order of ranks, float16 ones in float32.
    gradient_of: see basics.new_gradients. Values travel in full precision.

    Blocks. Raises MXNetError if ranks disagree about the shape, or if
    PERSEUS_ACCUMULATE_N_STEPS is set.
    """
    first = arrays[0]
    rows = [array.indices.asnumpy().astype(np.int64) for array in arrays]
    # A row before a rank's own, since MXNet has no empty arrays to send; its index tells the shape.
    indices = np.concatenate([[-first.shape[0] - 1], *rows])
    header = np.zeros((1, *first.shape[1:]), first.dtype)
    parts = [array.data.asnumpy() for array in arrays]
    values = np.concatenate([header, *(part for part in parts if len(part))])

    def gathered(array: Any, what: str, gradient_of: int) -> Any:
        given = mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype)
        (joined,) = ops.allgather(
            [given], f"{name}.{what}", priority=priority, gradient_of=gradient_of,
            process_set=process_set,
        )  # fmt: skip
        return joined.asnumpy()

    all_values = gathered(values, "values", gradient_of)
    all_indices = gathered(indices, "indices", 0)
    lengths = sorted({int(-index) - 1 for index in all_indices if index < 0})
    if len(lengths) > 1:
        raise mx.base.MXNetError(
            f"[perseus] {name}: ranks have row-sparse arrays of {lengths[0]} and {lengths[-1]} rows"
        )
    return _summed(all_indices, all_values, first)


def _summed(indices: Any, values: Any, like: Any) -> Any:
    """Sum the rows with equal indices; the result is ordered by index."""
    order = np.argsort(indices, kind="stable")
    rows, starts = np.unique(indices[order], return_index=True)
    wide = np.float32 if values.dtype == np.float16 else values.dtype
    sums = np.add.reduceat(values[order].astype(wide), starts, axis=0).astype(values.dtype)
    # The header rows have the smallest index, so their sum comes first.
    return from_rows(sums[1:], rows[1:], like)


def from_rows(values: Any, rows: Any, like: Any) -> Any:
    """Return a RowSparseNDArray on the CPU with these rows, and the shape and dtype of `like`."""
    if len(rows) == 0:
        return mx.nd.sparse.zeros("row_sparse", like.shape, ctx=mx.cpu(), dtype=like.dtype)
    return mx.nd.sparse.row_sparse_array(
        (values, rows), shape=like.shape, ctx=mx.cpu(), dtype=like.dtype
    )


def as_stored(array: Any, stype: str) -> Any:
    """Return an array with the given storage type: the array itself, or a converted one.

    MXNet's tostype() always makes a new one, by an op with temporary memory. If another op that
    used that memory has failed, and nobody has waited for it yet, MXNet silently skips this op.
    """
    return array if array.stype == stype else array.tostype(stype)


def copy(array: Any, out: Any) -> None:
    """Copy an array to another one, which may have another storage type."""
    as_stored(array, out.stype).copyto(out)


def copy_rows(array: Any, rows: Any, out: Any) -> None:
    """Set a row-sparse array to some rows of a dense or row-sparse one.

    rows: the int64 indices of the rows, ascending.
    """
    numbers = mx.nd.array(rows, ctx=array.context, dtype=rows.dtype)
    if array.stype == "row_sparse":
        chosen = mx.nd.sparse.retain(array, numbers)
    else:
        chosen = from_rows(mx.nd.take(array, numbers), rows, array)
    chosen.copyto(out)
