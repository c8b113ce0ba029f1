"""Functions that XLA compiles, with Perseus' XLA library: the same numbers as without XLA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import gradient_settings as settings
import keras
import numpy as np
import tensorflow as tf
from tensorflow_values import assert_equal, everyone, mine, numbers
from tf_residual_checks import with_variable_rate
from tf_training import (
    assert_equal_on_all_ranks,
    global_batch,
    loss_of,
    raised,
    share,
    variables,
)
from worlds import world_with

import perseus.tensorflow.horovod as hvd
import perseus.tensorflow.horovod.keras as hvd_keras
from perseus.tensorflow import mpi_ops, ops, xla

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint8, tf.int32, tf.int64]
SHAPES = [(1,), (5, 7), (3, 0, 2), (1031,)]


def _compiled(function):
    return tf.function(function, jit_compile=True)


def check_every_collective_gives_what_it_gives_without_xla() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for shape in SHAPES:
            given, all_ranks = mine(shape, dtype), everyone(shape)
            name = f"{dtype.name}.{'.'.join(map(str, shape))}"

            def collectives(value, name=name):
                return (
                    mpi_ops._allreduce(value, f"{name}.sum", op=hvd.Sum),
                    mpi_ops._allreduce(value, f"{name}.max", op=hvd.Max),
                    mpi_ops.allgather(value, f"{name}.gather"),
                    mpi_ops.broadcast(value, 1, f"{name}.copy"),
                )

            total, largest, rows, copied = _compiled(collectives)(given)
            assert_equal(total, all_ranks.sum(axis=0))
            assert_equal(largest, all_ranks.max(axis=0))
            assert_equal(rows, np.concatenate(list(all_ranks)))
            assert_equal(copied, all_ranks[1])
    given = mine((5, 2), tf.float32)
    part = _compiled(lambda value: mpi_ops._reducescatter(value, "part", op=hvd.Sum))(given)
    assert_equal(part, everyone((5, 2)).sum(axis=0)[slice(0, 3) if rank == 0 else slice(3, 5)])
    together, outcomes = _compiled(
        lambda a, b: ops.allreduce([a, b], "together", op=ops.Sum, prescale=2.0, grouped=True)
    )(mine((4,), tf.float32), mine((2, 3), tf.int32, 1))
    assert outcomes is None
    assert_equal(together[0], 2 * everyone((4,)).sum(axis=0))
    assert_equal(together[1], 2 * everyone((2, 3), 1).sum(axis=0))
    facts = (mpi_ops.rank_op, mpi_ops.size_op, mpi_ops.local_rank_op)
    told = _compiled(lambda: [fact() for fact in facts])()
    assert [int(number) for number in told] == [rank, size, rank]


def check_gradients_pass_through() -> None:
    for collective in (
        lambda value: mpi_ops._allreduce(value, op=hvd.Sum),
        mpi_ops.allgather,
        lambda value: mpi_ops.broadcast(value, 0),
        lambda value: mpi_ops._reducescatter(value, op=hvd.Sum),
    ):

        def gradient(value, collective=collective):
            with tf.GradientTape() as tape:
                tape.watch(value)
                result = collective(value * value)
                weights = tf.range(1.0, tf.cast(tf.size(result), tf.float32) + 1)
                loss = tf.reduce_sum(result * tf.reshape(weights, tf.shape(result)))
            return tape.gradient(loss, value)

        given = mine((4, 3), tf.float32)
        assert_equal(_compiled(gradient)(given), tf.function(gradient)(given).numpy())


def check_ranks_may_start_in_different_orders() -> None:
    if tuple(map(int, tf.__version__.split(".")[:2])) < (2, 21):
        return  # its programs wait for one collective before they start the next
    names = [f"order.{i}" for i in range(6)]
    mine_first = names[:: 1 if hvd.rank() == 0 else -1]
    for length in (3, 4099):

        def sums(value):
            found = {name: mpi_ops._allreduce(value * int(name[-1]), name) for name in mine_first}
            return [found[name] for name in names]

        result = _compiled(sums)(mine((length,), tf.float32))
        for factor, value in enumerate(result):
            assert_equal(value, factor * everyone((length,)).sum(axis=0))


def check_ranks_that_disagree_get_an_error_and_go_on() -> None:
    failing = _compiled(lambda value: mpi_ops._allreduce(value, "shape"))
    message = raised(tf.errors.OpError, lambda: failing(tf.ones([3 + hvd.rank()])))
    assert "Mismatched ALLREDUCE tensor shapes" in message, message
    uneven = _compiled(lambda value: mpi_ops.allgather(value, "rows"))
    message = raised(tf.errors.OpError, lambda: uneven(tf.ones([3 + hvd.rank()])))
    assert "different numbers of rows" in message, message
    message = raised(NotImplementedError, lambda: _compiled(mpi_ops.alltoall)(tf.ones([4])))
    assert "which it cannot" in message, message
    assert_equal(failing(tf.ones([2])), [hvd.size()] * 2)


def _trained(compiled: bool) -> list[np.ndarray]:
    """By the tape, in steps that may be withheld."""
    parameters = variables()

    def step(batch):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(parameters, batch)
        gradients = tape.gradient(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.assign_sub(0.1 * gradient)

    function = tf.function(step, jit_compile=compiled)
    for number in range(6):
        function(tf.constant(share(global_batch(number))))
    return [parameter.numpy() for parameter in parameters]


def _assert_trains_as_without_xla(train: Callable[[bool], list[np.ndarray]]) -> None:
    compiled = train(True)
    assert_equal_on_all_ranks(compiled)
    for got, expected in zip(compiled, train(False), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def check_what_one_rank_alone_refuses_is_an_error_of_all() -> None:
    refused = _compiled(lambda value: mpi_ops.broadcast(value, 7 * hvd.rank(), "refused"))
    for _ in range(2):
        message = raised(tf.errors.OpError, lambda: refused(tf.ones([4])))
        assert "broadcast received invalid root rank 7" in message
        assert hvd.rank() == 1 or "Rank 1 cannot take part: " in message
        assert_equal(mpi_ops._allreduce(tf.ones([2])), np.array([2, 2]))


def check_settings_for_gradients_act_under_xla() -> None:
    _assert_trains_as_without_xla(_trained)
    settings = [
        {"PERSEUS_ACCUMULATE_N_STEPS": 2},
        {"PERSEUS_PERF_CHECK_N_STEPS": 3},
        {"PERSEUS_OFFLINE_NEG": 1},
    ]
    for each in settings:
        with world_with(**each):
            _assert_trains_as_without_xla(_trained)


def check_a_slow_rank_is_named_under_xla() -> None:
    if not xla._is_typed(tf):
        return  # see the next check
    with world_with(PERSEUS_PERF_CHECK_N_STEPS=2), settings.captured_stderr() as text:
        weights = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([5]))]

        @_compiled
        def reduced():
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(weight * weight) for weight in weights)
            return hvd.DistributedGradientTape(tape).gradient(loss, weights)

        slow = settings.SlowRank(text)
        while not slow.named:
            slow.before_step()
            reduced()
            slow.after_step()


def check_the_search_for_slow_ranks_says_where_it_cannot_look_into_programs() -> None:
    for typed in (True, False):
        with (
            world_with(PERSEUS_PERF_CHECK_N_STEPS=2),
            mock.patch.object(xla, "_is_typed", lambda _, typed=typed: typed),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            _compiled(lambda value: mpi_ops._allreduce(value, "searched"))(tf.ones([3]))
        lines = [str(line.message) for line in told]
        assert any("PERSEUS_PERF_CHECK_N_STEPS" in line for line in lines) != typed, lines


def _fitted(compiled: bool) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(2)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse", jit_compile=compiled)
    inputs = numbers((16, 4), hvd.rank()).astype("float32") / 9
    model.fit(inputs, inputs[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def check_keras_trains_as_without_xla() -> None:
    _assert_trains_as_without_xla(_fitted)
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        _assert_trains_as_without_xla(_fitted)


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """By the rate of its own step, which is an input of the program."""
    sgd = tf.compat.v1.train.GradientDescentOptimizer
    settings.learning_rates(with_variable_rate(sgd, True, xla=True))
