"""Errors arrive as the exceptions that Horovod's users catch, in every way to run an op."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import tensorflow as tf
from tensorflow_values import WAYS, another_world, assert_equal, everyone, mine, raised

import perseus.tensorflow.horovod.keras as hvd_keras
from perseus import basics
from perseus.keras.library import keras
from perseus.tensorflow import mpi_ops as hvd
from perseus.tensorflow import ops

FailedPrecondition = tf.errors.FailedPreconditionError
InvalidArgument = tf.errors.InvalidArgumentError


def _usable() -> None:
    assert_equal(hvd._allreduce(mine((3,), tf.float32)), everyone((3,)).sum(axis=0))


def check_ranks_disagree() -> None:
    rank = hvd.rank()
    ones = partial(tf.ones, dtype=tf.float32)
    cases = {
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3, 2]": lambda: (
            hvd._allreduce(ones([3 + rank, 2]), "shape")
        ),
        "Mismatched data types: One rank had type float32": lambda: hvd._allreduce(
            tf.ones([3], tf.float64 if rank else tf.float32), "dtype"
        ),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0": lambda: hvd.broadcast(
            ones([3]), rank, "root"
        ),
        "Mismatched reduction operation": lambda: hvd._allreduce(
            ones([3]), "operation", op=hvd.Min if rank else hvd.Max
        ),
        "tried to ALLGATHER a rank-zero tensor": lambda: hvd.allgather(ones([]), "scalar"),
    }
    for text, function in cases.items():
        for way in WAYS.values():
            message = raised(FailedPrecondition, partial(way, function))
            assert text in message, message
            assert "Horovod" in message
            _usable()


def check_requests_that_make_no_sense() -> None:
    ones = np.ones([5, 2], np.float32)
    cases = {
        "broadcast received invalid root rank 7": lambda: hvd.broadcast(ones, 7),
        "not an even multiple of the number of workers": lambda: hvd.alltoall(ones),
        "Number of entries in splits does not equal number of workers": lambda: hvd.alltoall(
            ones, [5]
        ),
        "Sum of splits entries is greater than the first dimension": lambda: hvd.alltoall(
            ones, [3, 3]
        ),
        "alltoall expects a 1D splits tensor": lambda: hvd.alltoall(ones, [[2, 3]]),
        "Process set provided does not exist": lambda: hvd.size_op(99),
    }
    for text, function in cases.items():
        for way in (WAYS["eager"], WAYS["session"]):
            message = raised(InvalidArgument, partial(way, function))
            assert text in message, message
    _usable()
    assert "only supports AVERAGE and SUM" in raised(
        tf.errors.AbortedError, lambda: hvd._reducescatter(tf.ones([4]), op=hvd.Max)
    )
    for splits in (tf.constant([2, 3], tf.int64), tf.constant([2.0, 3.0])):
        message = raised(ValueError, lambda splits=splits: hvd.alltoall(tf.ones([5]), splits))
        assert "32-bit integer elements" in message
    unregistered = hvd.ProcessSet([0])
    raised(ValueError, lambda: hvd._allreduce(tf.ones([4]), process_set=unregistered))
    unregistered.process_set_id = 10
    raised(ValueError, lambda: hvd._allreduce(tf.ones([4]), process_set=unregistered))
    raised(ValueError, lambda: ops.allreduce([1.0, 2.0], ["a", "a"], op=ops.Sum))
    for way in (WAYS["eager"], WAYS["session"]):
        for tensor in (tf.constant("text"), tf.constant([40000, 2], tf.uint16)):
            for reduce in (hvd._allreduce, hvd._reducescatter):
                try:
                    way(lambda reduce=reduce, tensor=tensor: reduce(tensor.numpy()))
                except (TypeError, tf.errors.OpError) as error:
                    assert tensor.dtype.name in str(error), error
                else:
                    raise AssertionError(f"{tensor.dtype} was reduced")


def check_outsiders_of_a_process_set() -> None:
    with another_world(HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        last = hvd.add_process_set([1])
        if hvd.rank() == 0:
            for way in WAYS.values():
                message = raised(
                    InvalidArgument,
                    partial(way, lambda: hvd._allreduce(tf.ones([3]), process_set=last)),
                )
                assert "Rank 0 is not a member of the provided process set" in message
        _usable()


def check_an_error_of_one_op_leaves_the_others_of_its_step() -> None:
    @tf.function
    def step():
        good = hvd._allreduce(mine((3,), tf.float32), "good")
        return good, hvd._allreduce(tf.ones([3 + hvd.rank()]), "bad")

    raised(FailedPrecondition, step)
    _usable()


def check_what_one_rank_alone_refuses_is_named_to_the_others() -> None:
    rank = hvd.rank()

    def named():
        splits = tf.constant([2, 2 + 9 * rank])
        return mine((4,), tf.float32), hvd.alltoall(tf.ones([4]), splits, "refused by rank 1")

    def unnamed():
        return hvd.broadcast(tf.ones([4]), 7 * rank)

    for way in 2 * [*WAYS.values()]:
        for exchange, words in (
            (named, "Sum of splits entries is greater than the first dimension"),
            (unnamed, "broadcast received invalid root rank 7"),
        ):
            kind = InvalidArgument if rank else FailedPrecondition
            message = raised(kind, partial(way, exchange))
            assert words in message
            if rank == 0:
                assert "Rank 1 cannot take part: " in message
                assert exchange is unnamed or re.search("refused.by.rank.1", message), message
            _usable()


def check_ops_outside_of_a_world() -> None:
    reduce = partial(hvd._allreduce, tf.ones([3]))
    basics.shutdown()
    for function in (reduce, hvd.size_op, hvd.join):
        for way in (WAYS["eager"], WAYS["function"]):
            message = raised(FailedPrecondition, partial(way, function))
            assert "Horovod has not been initialized; use hvd.init()." in message
    basics.init()
    _usable()


def check_functions_that_were_traced_in_another_world() -> None:
    """They wait for init(), and go on in the next world; its process sets must be there again."""
    basics.shutdown()
    early = tf.function(lambda: hvd._allreduce(tf.fill([3], hvd.rank_op() + 1)))
    early = early.get_concrete_function()
    message = raised(FailedPrecondition, early)
    assert "Horovod has not been initialized; use hvd.init()." in message
    basics.init()
    with another_world(HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        first = hvd.add_process_set([0])
        late = tf.function(lambda: hvd._allreduce(mine((3,), tf.float32), process_set=first))
        late = late.get_concrete_function()
        assert_equal(early(), np.array([3, 3, 3]))
        if hvd.rank() == 0:
            assert_equal(late(), everyone((3,))[0])
    assert_equal(early(), np.array([3, 3, 3]))
    assert "Process set provided does not exist" in raised(InvalidArgument, late)
    _usable()


def check_fit_says_that_ranks_disagree() -> None:
    """In functions and eagerly; the next model trains."""
    for eagerly in (False, True):
        for units in (3 + hvd.rank(), 3):
            dense = keras.layers.Dense(units, use_bias=False)
            model = keras.Sequential([keras.Input((4,)), dense])
            optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
            model.compile(optimizer, "mse", run_eagerly=eagerly)
            fit = partial(model.fit, np.ones((8, 4)), np.ones((8, units)), verbose=0)
            everywhere = hvd.allgather(tf.constant([units]), name="units").numpy()
            if len({*everywhere}) == 1:
                fit()
            else:
                message = raised(FailedPrecondition, fit)
                assert "Mismatched ALLREDUCE tensor shapes" in message, message


def check_a_world_that_was_shut_down_ends_what_is_pending() -> None:
    """Rank 1 leaves while rank 0 waits for it in a graph."""
    if hvd.rank() == 0:
        step = tf.function(lambda: hvd._allreduce(tf.ones([3]), "nobody else has it"))
        assert "Horovod has been shut down" in raised(tf.errors.UnknownError, step)
        assert "Horovod has been shut down" in raised(
            tf.errors.UnknownError, partial(hvd._allreduce, tf.ones([3]))
        )
    basics.shutdown()
    basics.init()
    _usable()
