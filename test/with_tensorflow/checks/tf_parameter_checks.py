"""PERSEUS_PARAMETER_CHECK_N_STEPS with the tape and v1 optimizers, in any kind of graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import tensorflow as tf
from worlds import world_with

import perseus.tensorflow.horovod as hvd

v1 = tf.compat.v1


def _apart() -> float:
    """What the last rank's second variable has more than the others'."""
    return 1e-6 if hvd.rank() == hvd.size() - 1 else 0.0


def _tape_step(shift: float) -> Callable[[], None]:
    first = tf.Variable([1.0, 2.0], name="first")
    second = tf.Variable([[3.0 + shift] * 2] * 2, name="second")

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.linalg.matvec(second, first) * float(hvd.rank() + 1))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [first, second])
        for variable, gradient in zip([first, second], gradients, strict=True):
            variable.assign_sub(0.01 * gradient)

    return step


def _message(function: Callable[[], object]) -> str:
    try:
        function()
    except (tf.errors.UnknownError, hvd.HorovodInternalError) as error:
        return str(error)
    raise AssertionError("no error")


def check_the_tape_finds_what_differs() -> None:
    for wrap in (lambda step: step, lambda step: tf.function(step, autograph=False)):
        with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
            step = wrap(_tape_step(_apart()))
            step()
            step()
            message = _message(step)
            assert "after 2 steps the parameter second is not the same" in message, message
            assert f" on rank {hvd.size() - 1}); of 2 parameters 1 differs" in message, message


def check_the_tape_lets_equal_ones_pass() -> None:
    for steps in (1, 2):
        with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=steps):
            for wrap in (lambda step: step, lambda step: tf.function(step, autograph=False)):
                step = wrap(_tape_step(0.0))
                for _ in range(5):
                    step()


def _session_steps(
    shift: float, wrap: bool, hooks: list[object], resource: bool = True, steps: int = 5
) -> None:
    with tf.Graph().as_default():
        variable = v1.get_variable(
            "weight", initializer=tf.constant([1.0, 2.0 + shift]), use_resource=resource
        )
        loss = tf.reduce_sum(variable * float(hvd.rank() + 1))
        optimizer = v1.train.MomentumOptimizer(0.01, 0.9)
        optimizer = hvd.DistributedOptimizer(optimizer) if wrap else optimizer
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(steps):
                session.run(train)


def check_sessions_find_what_differs() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
        for resource in (True, False):
            message = _message(lambda r=resource: _session_steps(_apart(), True, [], r))
            assert "after 2 steps the parameter weight is not the same" in message, message


def check_sessions_let_equal_ones_pass() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=1):
        for resource in (True, False):
            hook = hvd.BroadcastGlobalVariablesHook(0)
            _session_steps(_apart(), True, [hook], resource)


def check_the_hook_warns_of_an_optimizer_that_nobody_wrapped() -> None:
    for wrap in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _session_steps(0.0, wrap, [hvd.BroadcastGlobalVariablesHook(0)])
        found = [entry for entry in caught if "not a DistributedOptimizer" in str(entry.message)]
        assert len(found) == (not wrap and hvd.rank() == 0), found
