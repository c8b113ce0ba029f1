"""Steps of Keras 2's optimizers: what codecs hold back in them, and parameters averaged in turn."""

from __future__ import annotations

from collections.abc import Callable

import gradient_settings as settings
import numpy as np
import tensorflow as tf
from keras2_checks import KINDS

import perseus.tensorflow.horovod as hvd_tf
import perseus.tensorflow.horovod.keras as hvd
from perseus.keras.library import keras

SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay


def _training(
    make: Callable[[], object],
    in_function: bool,
    passes: int = 1,
    scales: bool = False,
    before: Callable[[object, int], None] = lambda *_: None,
) -> settings.Reduce:
    """A training by minimize(), whose gradients are given; see keras_step_checks."""

    def train(given: list[settings.Arrays]) -> list[settings.Arrays]:
        variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=passes)
        if scales:
            optimizer = keras.mixed_precision.LossScaleOptimizer(
                optimizer, initial_scale=2.0**10, dynamic_growth_steps=1
            )

        def step(*slopes) -> None:
            with tf.GradientTape() as tape:
                products = zip(slopes, variables, strict=True)
                loss = tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])
            optimizer.minimize(loss, variables, tape=tape)

        run = tf.function(step, autograph=False) if in_function else step
        results = []
        for number, arrays in enumerate(given):
            before(optimizer, number)
            if scales:
                spoilt = [array.copy() for array in arrays]
                spoilt[0][0] = np.inf if hvd_tf.rank() == 1 else 1.0
                run(*map(tf.constant, spoilt))
            for _ in range(passes - 1):
                run(*map(tf.ones, settings.SHAPES))
            run(*[tf.constant(array - (passes - 1)) for array in arrays])
            results.append([variable.numpy() for variable in variables])
        return results

    return train


FORMS = ({}, {"passes": 2}, {"scales": True})


def check_parameters_are_averaged_after_the_step() -> None:
    """Calls without a step, where passes are summed up or a rank has an Inf, take no turn."""
    for kind in KINDS:
        for in_function in (False, True):
            for form in FORMS:
                train = _training(lambda kind=kind: kind.SGD(0.125), in_function, **form)
                settings.rotation_of_parameters(train, after=True, parts_of_all=(3,))


def check_a_rank_may_leave_out_the_step_after_compute_gradients() -> None:
    """Then the turn is taken before it, by all ranks."""

    def train_with(passes: int, compiled: bool) -> settings.Reduce:
        def train(given: list[settings.Arrays]) -> list[settings.Arrays]:
            variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
            optimizer = hvd.DistributedOptimizer(
                KINDS[0].SGD(0.125), backward_passes_per_step=passes
            )

            def compute(*slopes):
                with tf.GradientTape() as tape:
                    products = zip(slopes, variables, strict=True)
                    loss = tf.add_n([tf.reduce_sum(s * v) for s, v in products])
                found = optimizer.compute_gradients(loss, variables, tape)
                return [gradient for gradient, _ in found]

            run = tf.function(compute, autograph=False) if compiled else compute
            results = []
            for number, arrays in enumerate(given):
                for _ in range(passes - 1):
                    run(*map(tf.ones, settings.SHAPES))
                found = run(*[tf.constant(array - (passes - 1)) for array in arrays])
                if not settings.left_out(hvd_tf.rank(), number):
                    optimizer.apply_gradients(zip(found, variables, strict=True))
                results.append([variable.numpy() for variable in variables])
            return results

        return train

    for passes in (1, 2):
        for compiled in (False, True):
            settings.rotation_of_parameters(
                train_with(passes, compiled), parts_of_all=(3,), leaves_out=settings.left_out
            )


def _set_rate(optimizer, step: int) -> None:
    optimizer.learning_rate = settings.RATES[step]
    settings.flush_before_last(step)


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """By the rate of its own step, whatever the rate is when it arrives."""
    boundaries = list(range(len(settings.RATES) - 1))
    for kind in KINDS:
        for in_function in (False, True):
            for form in FORMS:
                settings.learning_rates(
                    _training(
                        lambda kind=kind: kind.SGD(7.0), in_function, before=_set_rate, **form
                    )
                )
            settings.learning_rates(
                _training(
                    lambda kind=kind: kind.SGD(SCHEDULE(boundaries, settings.RATES)),
                    in_function,
                    before=lambda _, step: settings.flush_before_last(step),
                )
            )


def check_other_optimizers_tell_no_rates() -> None:
    """Their steps may not be proportional to rate and gradient."""
    for kind in KINDS:
        derived = type("Derived", (kind.SGD,), {})
        for make in (lambda made=derived: made(7.0), lambda kind=kind: kind.SGD(7.0, clipnorm=1e6)):
            settings.learning_rates(_training(make, True, before=_set_rate), known=False)
