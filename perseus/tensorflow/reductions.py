"""Collectives that combine values: allreduce and reduce-scatter, plain and grouped; sparse ones.

They work in eager mode, in tf.function and in sessions, and are differentiable. Common arguments:

name: pairs the operation across ranks, in whatever order they submit it. None: the operation's
    name in its graph; in eager mode a number, for which all ranks must call the same operations.
device_dense, device_sparse: where to put the operation, as tf.device takes it; "" = where TF does.
op: Average, Sum, Min, Max, Product or Adasum.
prescale_factor, postscale_factor: multiplied in before and after; integers truncate towards zero.
process_set: the ranks that take part.
ignore_name_scope: leave the name scope out of the name.

Errors are TensorFlow's: InvalidArgumentError for what cannot be served, FailedPreconditionError on
every rank where shapes, dtypes or arguments differ, UnknownError where the world has broken.
Source of behaviour: Horovod 0.28.1, horovod.tensorflow.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from perseus import config
from perseus.arguments import checked_compression
from perseus.compat.common.extensions import get_average_backwards_compatibility_fun
from perseus.compression import Compressor, applied_here
from perseus.process_sets import ProcessSet, global_process_set, group_id
from perseus.tensorflow import ops
from perseus.tensorflow.compression import Compression, in_graphs
from perseus.tensorflow.modes import on_device
from perseus.tensorflow.ops import Average, Sum

_resolve_op = get_average_backwards_compatibility_fun(ops)

_DENSE_ONLY = (
    "[tensorflow] tf.IndexedSlices can be reduced with op=Average or op=Sum and without factors "
    "only; make them dense with tf.convert_to_tensor or sparse_as_dense=True"
)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of a tensor over all ranks, as a new tensor.

    tensor: tf.Tensor or variable of any shape, equal on all ranks. tf.IndexedSlices: values and
        indices of all ranks are joined instead, and Average divides the values by the number of
        ranks, integers into floats; NotImplementedError for other ops and factors.
    average: Horovod's deprecated form of op. compression: applies to what is sent. The rest: see
        the module.
    """
    op = _resolve_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if op not in (Average, Sum) or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError(_DENSE_ONLY)
        with on_device(device_sparse):
            return reduce_slices(tensor, name, op, process_set, compression)
    with on_device(device_dense):
        codec = _codec(compression, name)
        outer = in_graphs(applied_here(compression))
        sent, context = outer.compress(tf.convert_to_tensor(tensor))
        outputs, _ = ops.allreduce(
            [sent], name, op=op, prescale=prescale_factor, postscale=postscale_factor,
            process_set=process_set, codec=codec[0], codec_argument=codec[1],
            ignore_name_scope=ignore_name_scope,
        )  # fmt: skip
        return outer.decompress(outputs[0], context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """The reductions of several tensors as one operation, as new tensors.

    They are executed together once all of them are ready on all ranks; dtypes may differ. An empty
    list is returned as it is. tf.IndexedSlices among them are reduced one by one. See allreduce.
    """
    if not tensors:
        return list(tensors)
    op = _resolve_op(op, average)
    results = list(tensors)
    dense = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[index] = allreduce(
                tensor, None, device_dense, device_sparse, compression, op, prescale_factor,
                postscale_factor, None if name is None else f"{name}_{index + 1}of{len(tensors)}",
                process_set, ignore_name_scope,
            )  # fmt: skip
        else:
            dense.append(index)
    if not dense:
        return results
    with on_device(device_dense):
        codec = _codec(compression, name)
        outer = in_graphs(applied_here(compression))
        pairs = [outer.compress(tf.convert_to_tensor(tensors[index])) for index in dense]
        outputs, _ = ops.allreduce(
            [sent for sent, _ in pairs], name, op=op, prescale=prescale_factor,
            postscale=postscale_factor, process_set=process_set, codec=codec[0],
            codec_argument=codec[1], grouped=True, ignore_name_scope=ignore_name_scope,
        )  # fmt: skip
        for index, output, (_, context) in zip(dense, outputs, pairs, strict=True):
            results[index] = outer.decompress(output, context)
    return results


def _codec(compression: type[Compressor], name: str | None) -> tuple[int, float]:
    compression = checked_compression(compression, "tensorflow")
    if compression.stateful and name is None and tf.executing_eagerly():
        raise ValueError(
            f"[tensorflow] {compression.__name__} keeps what it holds back under the tensor's "
            "name: pass name=, the same one every time"
        )
    return compression.codec, compression.argument


def set_size(process_set: ProcessSet, dtype: tf.DType) -> Any:
    """The number of ranks in a set; read when the graph runs, if elastic training may change it."""
    if config.elastic():
        return tf.cast(ops.size_op(group_id(process_set)), dtype)
    return tf.constant(process_set.size(), dtype)


def divided_by_size(tensor: Any, process_set: ProcessSet) -> Any:
    """A tensor or tf.IndexedSlices divided by the number of ranks.

    Integers in a tensor truncate. In slices they become floats, as in Horovod: rows of one index
    are still to be added, and truncated parts would not add up to the mean.
    """
    if isinstance(tensor, tf.IndexedSlices):
        values = tensor.values / set_size(process_set, tensor.values.dtype)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    if tensor.dtype.is_integer:
        return tf.truncatediv(tensor, set_size(process_set, tensor.dtype))
    return tensor / set_size(process_set, tensor.dtype)


def reduce_slices(
    slices: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    compression: type[Compressor],
    gradient_of: int = 0,
) -> Any:
    """Values and indices of all ranks joined; the values divided for Average."""
    outer = in_graphs(compression)
    values, context = outer.compress(slices.values)
    names = (None, None) if name is None else (f"{name}.values", f"{name}.indices")
    (gathered,) = ops.allgather(
        [values], names[0], process_set=process_set, gradient_of=gradient_of
    )
    (indices,) = ops.allgather([slices.indices], names[1], process_set=process_set)
    gathered = outer.decompress(gathered, context)
    joined = tf.IndexedSlices(gathered, indices, slices.dense_shape)
    return divided_by_size(joined, process_set) if op == Average else joined


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction over all ranks; op Average or Sum.

    tensor: at least one dimension, equal shapes on all ranks. Rank r of n gets dim0 // n rows, one
    more if r < dim0 % n.
    """
    with on_device(device_dense):
        outer = in_graphs(compression)
        sent, context = outer.compress(tf.convert_to_tensor(tensor))
        outputs = ops.reducescatter(
            [sent], name, op=op, prescale=prescale_factor, postscale=postscale_factor,
            process_set=process_set, ignore_name_scope=ignore_name_scope,
        )  # fmt: skip
        return outer.decompress(outputs[0], context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """reducescatter of several tensors as one operation; an empty list is returned as it is."""
    if not tensors:
        return list(tensors)
    with on_device(device_dense):
        outer = in_graphs(compression)
        pairs = [outer.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
        outputs = ops.reducescatter(
            [sent for sent, _ in pairs], op=op, prescale=prescale_factor,
            postscale=postscale_factor, process_set=process_set, grouped=True,
        )  # fmt: skip
        return [
            outer.decompress(output, context)
            for output, (_, context) in zip(outputs, pairs, strict=True)
        ]
