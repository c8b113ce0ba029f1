"""What graphs add: names, order, overlap, functions in functions, loops, sessions with hooks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow_values import assert_equal, everyone, mine

from perseus.tensorflow import mpi_ops as hvd
from perseus.tensorflow.library import OPS


def check_equal_ops_are_neither_merged_nor_folded_nor_dropped() -> None:
    """One rank has a graph that begs for it, the other one waits for each of its ops."""
    one = np.ones(3, np.float32)
    if hvd.rank() == 0:

        @tf.function
        def step():
            hvd._allreduce(tf.constant(one), "unused")
            return [hvd._allreduce(tf.constant(one), name) for name in ("left", "right")]

        left, right = step()
    else:
        hvd._allreduce(one, "unused")
        left, right = (hvd._allreduce(one * k, name) for k, name in ((2, "left"), (5, "right")))
    assert_equal(left, one * 3)
    assert_equal(right, one * 6)


def check_ops_do_not_wait_for_each_other() -> None:
    @tf.function
    def step(tensor):
        return [hvd._allreduce(tensor * factor) for factor in (1.0, 2.0, 3.0)], hvd.rank_op()

    nodes = step.get_concrete_function(tf.TensorSpec([4])).graph.get_operations()
    ours = [node for node in nodes if node.type in OPS]
    assert len(ours) == 4
    assert not any(node.control_inputs for node in ours)


def check_shapes_are_known_while_tracing() -> None:
    @tf.function
    def step(tensor):
        shapes = [
            hvd._allreduce(tensor).shape,
            hvd.broadcast(tensor, 0).shape,
            hvd.allgather(tensor).shape,
            hvd.alltoall(tensor).shape,
            hvd._reducescatter(tensor).shape,
            hvd.join().shape,
        ]
        assert [shape.as_list() for shape in shapes] == [[4, 3]] * 2 + [[None, 3]] * 3 + [[]]
        return tensor

    step.get_concrete_function(tf.TensorSpec([4, 3]))


def check_ranks_pair_by_name_whatever_comes_first() -> None:
    """Each rank has the tensor early that the other one has late."""

    @tf.function
    def step(matrix, early, late):
        for _ in tf.range(20):
            matrix = tf.linalg.matmul(matrix, matrix) / tf.norm(matrix)
        after = tf.reduce_sum(matrix) * 0.0
        first = hvd._allreduce(early, early_name)
        second = hvd._allreduce(late + after, late_name)
        return first, second

    matrix = tf.random.stateless_uniform([200, 200], [1, 2])
    low, high = mine((50,), tf.float32, 0), mine((50,), tf.float32, 1)
    if hvd.rank() == 0:
        early_name, late_name = "low", "high"
        found_low, found_high = step(matrix, low, high)
    else:
        early_name, late_name = "high", "low"
        found_high, found_low = step(matrix, high, low)
    assert_equal(found_low, everyone((50,), 0).sum(axis=0))
    assert_equal(found_high, everyone((50,), 1).sum(axis=0))


def check_many_ops_of_one_graph_pair_up() -> None:
    @tf.function
    def step(tensors):
        return [hvd._allreduce(tensor) for tensor in tensors]

    for salt in range(3):
        tensors = [mine((10 + i,), tf.float32, salt + i) for i in range(100)]
        for i, total in enumerate(step(tensors)):
            assert_equal(total, everyone((10 + i,), salt + i).sum(axis=0))
    assert step.experimental_get_tracing_count() == 1


def check_names_of_nodes() -> None:
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, [2], name="some/where")
        assert hvd._allreduce(tensor).op.name == "HorovodAllreduce_some_where_0"
        assert hvd._allreduce(tensor).op.name == "HorovodAllreduce_some_where_0_1"
        assert hvd.allgather(tensor, "mine:0").op.name == "mine_0"
        with tf.name_scope("scope"):
            assert hvd.broadcast(tensor, 0, "x").op.name == "scope/x"


def check_scopes_may_differ_where_they_are_ignored() -> None:
    @tf.function
    def step(tensor):
        with tf.name_scope(f"rank{hvd.rank()}"):
            return hvd._allreduce(tensor, "shared", ignore_name_scope=True)

    assert_equal(step(mine((3,), tf.float32)), everyone((3,)).sum(axis=0))


def check_a_function_called_twice_in_a_step() -> None:
    @tf.function
    def layer(tensor):
        return hvd._allreduce(tensor, "inside")

    @tf.function
    def step(first, second):
        return layer(first), layer(second)

    first, second = step(mine((7,), tf.float32, 1), mine((7,), tf.float32, 2))
    assert_equal(first, everyone((7,), 1).sum(axis=0))
    assert_equal(second, everyone((7,), 2).sum(axis=0))


def check_loops_and_branches() -> None:
    @tf.function
    def step(tensor, steps):
        for i in tf.range(steps):
            if i % 2 == 0:
                tensor = hvd._allreduce(tensor, "even")
            else:
                tensor = hvd._allreduce(tensor + tf.cast(hvd.rank_op(), tf.float32), op=hvd.Average)
        return tensor

    # Equal on all ranks after the first.
    total = everyone((4,)).sum(axis=0)
    assert_equal(step(mine((4,), tf.float32), 4), (total + 0.5) * 2 + 0.5)


def check_a_session_that_is_monitored() -> None:
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        total = hvd._allreduce(mine((3,), tf.float32))
        count = tf.compat.v1.assign_add(step, 1)
        hooks = [tf.compat.v1.train.StopAtStepHook(last_step=3)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                found, steps = session.run([total, count])
                assert_equal(found, everyone((3,)).sum(axis=0))
    assert steps == 3


def check_what_an_op_reads_may_be_overwritten_afterwards() -> None:
    variable = tf.Variable(np.full(100_000, hvd.rank() + 1.0, np.float32))

    @tf.function
    def step():
        total = hvd._allreduce(variable)
        with tf.control_dependencies([total]):
            variable.assign_add(total)
        return total

    assert_equal(step(), np.full(100_000, 3.0))
    assert_equal(variable.value(), np.full(100_000, hvd.rank() + 4.0))
