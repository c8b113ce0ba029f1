"""The gradients of the collectives, which the import of this module registers with TensorFlow.

They are collectives as well, so all ranks must differentiate the same operations. Stateless.
Source of the formulas: Horovod 0.28.1, horovod.tensorflow.mpi_ops.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from perseus.process_sets import ProcessSet
from perseus.tensorflow import ops, xla
from perseus.tensorflow.library import OPS_WITHOUT_GRADIENT, native


def _group(op: Any) -> Any:
    """Return the process set of an op, which has its number only."""
    made = ProcessSet([])
    made.process_set_id = op.get_attr("process_set_id")
    return made


def _dense(op: Any, grads: tuple[Any, ...]) -> list[Any]:
    """Return the gradients of an op's outputs as dense tensors; zeros for unused outputs."""
    return [
        tf.zeros_like(tensor) if grad is None else tf.convert_to_tensor(grad)
        for tensor, grad in zip(op.outputs, grads, strict=True)
    ]


def _average(tensors: list[Any], process_set: Any, grouped: bool) -> list[Any]:
    return ops.allreduce(tensors, op=ops.Average, process_set=process_set, grouped=grouped)[0]


def _allreduce(op: Any, *grads: Any) -> list[Any]:
    """Reduce the gradients in the same way as the inputs."""
    rates = op.get_attr("rates")
    count = len(op.inputs) - rates
    given = _dense(op, grads)[:count]
    grouped = op.get_attr("grouped")
    reduced = native.perseus_allreduce(
        given,
        [],
        outcomes=0,
        **{
            name: op.get_attr(name)
            for name in ("reduce_op", "prescale", "postscale", "process_set_id", "codec_argument")
        },
        codec=op.get_attr("codec"),
        grouped=grouped,
        **ops.naming("HorovodAllreduce", None, given, False),
    )[0]
    ops.keep_shapes(reduced, given)
    return [*reduced, *[None] * rates]


def _allgather(op: Any, *grads: Any) -> list[Any]:
    """Return this rank's rows of the averaged gradients."""
    process_set = _group(op)
    grouped = op.get_attr("grouped")
    means = _average(_dense(op, grads), process_set, grouped)
    if xla.within():  # XLA needs static shapes, so every rank has equally many rows
        rank = ops.index_op(process_set.process_set_id)
        return [_part(mean, rank, tensor) for mean, tensor in zip(means, op.inputs, strict=True)]
    rows = tf.stack([tf.shape(tensor)[0] for tensor in op.inputs])
    counts = ops.allgather([rows[tf.newaxis, :]], process_set=process_set)[0]
    rank = ops.index_op(process_set.process_set_id)
    first = tf.reduce_sum(counts[:rank], axis=0)
    return [mean[first[i] : first[i] + rows[i]] for i, mean in enumerate(means)]


def _part(joined: Any, index: Any, like: Any) -> Any:
    """Return the part of `joined` with this index, where all parts have the shape of `like`."""
    shape = tf.shape(like)
    return tf.slice(joined, tf.concat([[index * shape[0]], tf.zeros_like(shape)[1:]], 0), shape)


def _broadcast(op: Any, *grads: Any) -> list[Any]:
    """Return the averaged gradients on the root, and zeros elsewhere, where inputs are unused."""
    means = _average(_dense(op, grads), _group(op), op.get_attr("grouped"))
    is_root = tf.equal(ops.rank_op(), op.get_attr("root_rank"))
    return [tf.where(is_root, mean, tf.zeros_like(mean)) for mean in means]


def _alltoall(op: Any, *grads: Any) -> list[Any]:
    """Send the gradients back to the ranks of their rows; zeros for rows that were not sent."""
    if grads[0] is None:
        grad = tf.zeros_like(op.outputs[0])
    else:
        grad = tf.convert_to_tensor(grads[0])
    returned, _ = ops.alltoall(grad, op.outputs[1], process_set=_group(op))
    rest = tf.shape(op.inputs[0])[0] - tf.shape(returned)[0]
    zeros = tf.zeros(tf.concat([[rest], tf.shape(returned)[1:]], axis=0), returned.dtype)
    return [tf.concat([returned, zeros], axis=0), None]


def _reducescatter(op: Any, *grads: Any) -> list[Any]:
    """Concatenate the scaled gradients of all ranks' parts."""
    process_set = _group(op)
    scale = ops.real(op.get_attr("prescale")) * ops.real(op.get_attr("postscale"))
    size = ops.size_op(process_set.process_set_id)
    scaled = []
    for grad in _dense(op, grads):
        factor = tf.cast(scale, grad.dtype)
        if op.get_attr("reduce_op") == ops.Sum:
            factor *= tf.cast(size, grad.dtype)
        scaled.append(grad * factor)
    gathered = ops.allgather(scaled, process_set=process_set, grouped=op.get_attr("grouped"))
    ops.keep_shapes(gathered, op.inputs)
    return gathered


for _name, _gradient in {
    "PerseusAllreduce": _allreduce,
    "PerseusAllgather": _allgather,
    "PerseusBroadcast": _broadcast,
    "PerseusAlltoall": _alltoall,
    "PerseusReducescatter": _reducescatter,
}.items():
    tf.RegisterGradient(_name)(_gradient)
for _name in OPS_WITHOUT_GRADIENT:
    tf.no_gradient(_name)
