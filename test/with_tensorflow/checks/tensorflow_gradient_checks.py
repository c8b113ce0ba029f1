"""The registered gradients against Horovod's formulas, eagerly and in graphs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow_values import another_world, assert_equal, everyone, mine

from perseus.tensorflow import mpi_ops as hvd
from perseus.tensorflow import ops

SHAPE = (5, 2)


def _weights(rank: int, salt: int, rows: int) -> np.ndarray:
    """What the loss multiplies the output with: the output's gradient, different on each rank."""
    return np.arange(rows * 2, dtype=np.float64).reshape(rows, 2) * (rank + 1) + salt


def _gradients(function) -> list:
    """Of sum(weights * output) for each output, eagerly; equal in a tf.function."""

    def differentiate(tensor):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            outputs = function(tensor)
            loss = 0.0
            for salt, output in enumerate(outputs):
                rows = output.shape[0] if tf.executing_eagerly() else tf.shape(output)[0]
                flat = tf.reshape(tf.range(rows * 2), [rows, 2])
                weights = tf.cast(flat, tensor.dtype) * (hvd.rank() + 1.0) + float(salt)
                loss += tf.reduce_sum(output * weights)
        return tape.gradient(loss, tensor)

    eager = differentiate(mine(SHAPE, tf.float64))
    traced = tf.function(differentiate)(mine(SHAPE, tf.float64))
    assert_equal(traced, eager.numpy())
    return eager


def _sum_of_weights(salt: int, rows: int) -> np.ndarray:
    return sum(_weights(rank, salt, rows) for rank in range(hvd.size()))


def check_allreduce() -> None:
    got = _gradients(lambda x: [hvd._allreduce(x, op=hvd.Sum, prescale_factor=0.5)])
    assert_equal(got, 0.5 * _sum_of_weights(0, 5))
    got = _gradients(lambda x: [hvd._allreduce(x, op=hvd.Average)])
    assert_equal(got, _sum_of_weights(0, 5) / 2)


def check_allreduce_with_a_learning_rate() -> None:
    got = _gradients(
        lambda x: ops.allreduce([x, x], "both", op=hvd.Sum, learning_rate=0.5, grouped=True)[0]
    )
    assert_equal(got, _sum_of_weights(0, 5) + _sum_of_weights(1, 5))


def check_grouped_allreduce() -> None:
    got = _gradients(lambda x: hvd._grouped_allreduce([x, x], op=hvd.Sum))
    assert_equal(got, _sum_of_weights(0, 5) + _sum_of_weights(1, 5))


def check_a_group_of_which_one_output_is_used() -> None:
    got = _gradients(lambda x: hvd._grouped_allreduce([x, x], op=hvd.Sum)[:1])
    assert_equal(got, _sum_of_weights(0, 5))


def check_allgather() -> None:
    rows = [2, 4]
    own = rows[hvd.rank()]
    expected = np.zeros(SHAPE)
    expected[:own] = np.split(_sum_of_weights(0, 6) / 2, [2])[hvd.rank()]
    assert_equal(_gradients(lambda x: [hvd.allgather(x[:own])]), expected)
    got = _gradients(lambda x: hvd.grouped_allgather([x[:own], x[:own]]))
    expected[:own] += np.split(_sum_of_weights(1, 6) / 2, [2])[hvd.rank()]
    assert_equal(got, expected)


def check_broadcast() -> None:
    got = _gradients(lambda x: [hvd.broadcast(x, 1)])
    assert_equal(got, _sum_of_weights(0, 5) / 2 * (hvd.rank() == 1))


def check_alltoall() -> None:
    """Rank r sends r + 1 rows to rank 0 and two rows to rank 1; what is left has no gradient."""
    rank = hvd.rank()
    splits = [[1, 2], [2, 2]]
    got = _gradients(lambda x: [hvd.alltoall(x, splits[rank])[0]])
    expected = np.zeros(SHAPE)
    begin = [0, splits[rank][0]]
    for to in range(2):
        received = _weights(to, 0, splits[0][to] + splits[1][to])
        part = np.split(received, [splits[0][to]])[rank]
        expected[begin[to] : begin[to] + splits[rank][to]] = part
    assert_equal(got, expected)


def check_reducescatter() -> None:
    rows = [3, 2]
    weights = np.concatenate([_weights(rank, 0, rows[rank]) for rank in range(2)])
    got = _gradients(lambda x: [hvd._reducescatter(x, op=hvd.Sum, postscale_factor=0.5)])
    assert_equal(got, weights * 2 * 0.5)
    got = _gradients(lambda x: [hvd._reducescatter(x, op=hvd.Average)])
    assert_equal(got, weights)
    got = _gradients(lambda x: hvd._grouped_reducescatter([x, x], op=hvd.Average))
    more = np.concatenate([_weights(rank, 1, rows[rank]) for rank in range(2)])
    assert_equal(got, weights + more)


def check_in_a_process_set() -> None:
    with another_world(HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        last = hvd.add_process_set([1])
        if last.included():
            got = _gradients(
                lambda x: [
                    hvd.allgather(x, process_set=last),
                    hvd.broadcast(x, 1, process_set=last),
                    hvd._allreduce(x, process_set=last),
                ]
            )
            assert_equal(got, sum(_weights(1, salt, 5) for salt in range(3)))


def check_of_a_v1_graph() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tensor = mine((4,), tf.float32)
        total = hvd._allreduce(tensor, op=hvd.Sum)
        (gradient,) = tf.gradients(total * (hvd.rank() + 1.0), [tensor])
        found = session.run([total, gradient])
    assert_equal(found[0], everyone((4,)).sum(axis=0))
    assert_equal(found[1], np.full(4, 3.0))
