"""Keras 2 after disable_eager_execution(): what works there trains as it does in eager mode.

In a process of its own, since nothing turns eager execution on again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

tf.compat.v1.disable_eager_execution()

import gradient_settings as settings
from keras2_checks import BATCHES, LOCAL, _close, _data, _fit, _joined, _model
from worlds import world_with

import perseus.tensorflow.horovod as hvd_tf
import perseus.tensorflow.horovod.keras as hvd
from perseus.keras.library import keras

legacy = keras.optimizers.legacy


def value_of(variable) -> np.ndarray:
    return keras.backend.get_value(variable)


def _values(variables) -> list[np.ndarray]:
    return [np.asarray(value) for value in keras.backend.batch_get_value(list(variables))]


def _same_everywhere(variables) -> None:
    for index, value in enumerate(_values(variables)):
        root = hvd.broadcast(value, 0, name=f"same_{index}")
        assert isinstance(root, np.ndarray | np.generic)
        assert np.array_equal(root, value), (index, root, value)


def check_fit_is_fit_with_the_joined_batch() -> None:
    model, reference = _model(), _model()
    model.compile(hvd.DistributedOptimizer(legacy.Adam(0.01)), "mse")
    reference.compile(legacy.Adam(0.01), "mse")
    _fit(model)
    _fit(reference, _joined(_data), size=LOCAL * hvd_tf.size())
    _close(model.get_weights(), reference.get_weights())
    _same_everywhere([*model.weights, *model.optimizer.variables()])


def check_backward_passes_are_summed_up() -> None:
    for average in (False, True):
        model, reference = _model(), _model()
        optimizer = hvd.DistributedOptimizer(
            legacy.SGD(0.02, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        model.compile(optimizer, "mse")
        reference.compile(legacy.SGD(0.02 if average else 0.04, momentum=0.9), "mse")
        x, y = _data(hvd_tf.rank())
        start = model.get_weights()
        for first in (0, LOCAL, 2 * LOCAL):
            model.train_on_batch(x[first : first + LOCAL], y[first : first + LOCAL])
            if first == 0:
                assert all(map(np.array_equal, model.get_weights(), start))
        # Two passes of each rank are one step.
        x, y = _joined(_data)
        both = 2 * LOCAL * hvd_tf.size()
        reference.train_on_batch(x[:both], y[:both])
        _close(model.get_weights(), reference.get_weights())
        assert value_of(optimizer.iterations) == 3
        assert value_of(optimizer._agg_helper.counter) == 1


class _Slopes(keras.layers.Layer):
    """The sum of parameters times inputs, which are thus the gradients."""

    def build(self, _) -> None:
        self.parameters = [
            self.add_weight(f"w{i}", shape, initializer="zeros")
            for i, shape in enumerate(settings.SHAPES)
        ]
        super().build(_)

    def call(self, inputs):
        return tf.add_n(
            [
                tf.reshape(tf.reduce_sum(x * w), [1, 1])
                for x, w in zip(inputs, self.parameters, strict=True)
            ]
        )


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """By the rate of its own step, whatever the rate is when it arrives."""
    for passes in (1, 2):

        def train(given: list[settings.Arrays], passes=passes) -> list[settings.Arrays]:
            inputs = [keras.Input(shape) for shape in settings.SHAPES]
            model = keras.Model(inputs, _Slopes()(inputs))
            optimizer = hvd.DistributedOptimizer(legacy.SGD(7.0), backward_passes_per_step=passes)
            model.compile(optimizer, lambda _, sums: tf.reduce_mean(sums))
            results = []
            for number, arrays in enumerate(given):
                optimizer.learning_rate = settings.RATES[number]
                settings.flush_before_last(number)
                for _ in range(passes - 1):
                    ones = [np.ones((1, *shape)) for shape in settings.SHAPES]
                    model.train_on_batch(ones, np.zeros([1, 1]))
                rest = [array[np.newaxis] - (passes - 1) for array in arrays]
                model.train_on_batch(rest, np.zeros([1, 1]))
                results.append(model.get_weights())
            return results

        settings.learning_rates(train)


def check_gradients_of_the_core_may_not_be_applied() -> None:
    skip = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    with world_with(**skip):
        model = _model()
        model.compile(hvd.DistributedOptimizer(legacy.Adam(0.01)), "mse")
        x, y = _data(hvd_tf.rank())
        if hvd_tf.rank() == 0:
            x[LOCAL + 1] = np.nan  # in the second of four batches
        _fit(model, (x, y), epochs=1)
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert value_of(model.optimizer.iterations) == BATCHES - 1
        _same_everywhere(model.weights)


def check_saved_models_go_on() -> None:
    model = _model()
    model.compile(hvd.DistributedOptimizer(legacy.Adam(0.01)), "mse")
    _fit(model)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.h5")
        model.save(path)
        loaded = hvd.load_model(path)
        plain = keras.models.load_model(path)
    assert not hasattr(plain.optimizer, "register_local_var")
    assert hasattr(loaded.optimizer, "register_local_var")
    for trained in (model, loaded):
        _fit(trained, epochs=1)
    _close(loaded.get_weights(), model.get_weights())
    variables = loaded.optimizer.variables()
    assert len(variables) == 1 + 2 * 4
    _close(_values(variables), _values(model.optimizer.variables()))
    assert value_of(loaded.optimizer.iterations) == 3 * BATCHES
    _same_everywhere(loaded.weights)


def check_weights_and_state_are_the_roots_after_a_batch() -> None:
    model = _model(seed=hvd_tf.rank())
    kept = model.weights[1]
    keras.backend.set_value(kept, value_of(kept) + hvd_tf.rank())
    model.compile(hvd.DistributedOptimizer(legacy.Adam(0.01)), "mse")
    _fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [kept])])
    _same_everywhere([v for v in model.weights if v is not kept] + model.optimizer.variables())
    everyone = hvd.allgather(value_of(kept)[None], name="kept")
    assert not np.array_equal(everyone[0], everyone[-1])


def check_the_learning_rate_follows_and_metrics_are_means() -> None:
    model = _model()
    model.compile(hvd.DistributedOptimizer(legacy.SGD(0.3, momentum=0.5)), "mse")
    rates, logged = [], []

    class Watch(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            rates.append(float(value_of(model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            logged.append(dict(logs))

    schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch)
    mean = hvd.callbacks.MetricAverageCallback()
    x, y = _data(hvd_tf.rank())
    _fit(model, (x, y), 2, [schedule, mean, Watch()])
    _close(rates, [0.4] * BATCHES + [0.2] * BATCHES)
    _close([logs["lr"] for logs in logged], [0.4, 0.2])
    for number, logs in enumerate(logged):
        everywhere = hvd.allgather(np.array([logs["loss"]]), name=f"loss{number}")
        assert (everywhere == logs["loss"]).all()

    def velocities() -> list[np.ndarray]:
        return _values(model.optimizer.get_slot(weight, "momentum") for weight in model.weights)

    before = velocities()
    assert any(velocity.any() for velocity in before)
    schedule.model, schedule.current_epoch = model, 2
    schedule.on_batch_begin(0)
    _close(velocities(), [velocity * 0.5 for velocity in before])


def check_states_are_of_variables() -> None:
    model = _model(seed=hvd_tf.rank())
    model.compile(hvd.DistributedOptimizer(legacy.Adam(0.01)), "mse")
    for make in (hvd.elastic.KerasState, hvd_tf.elastic.TensorFlowKerasState):
        try:
            make(model)
        except NotImplementedError as error:
            assert "use hvd.elastic.TensorFlowState(" in str(error), error
        else:
            raise AssertionError("a state was made")
    _fit(model, epochs=1)
    variables = [*model.weights, *model.optimizer.variables()]
    session = tf.compat.v1.keras.backend.get_session()
    state = hvd_tf.elastic.TensorFlowState(variables, session=session, epoch=hvd_tf.rank() + 3)
    state.sync()
    assert state.epoch == 3
    _same_everywhere(variables)
    saved = _values(variables)
    _fit(model, epochs=1)
    after = _values(variables)
    assert not any(map(np.array_equal, after, saved))
    state.restore()
    assert all(map(np.array_equal, _values(variables), saved))
    _fit(model, epochs=1)
    _close(_values(variables), after)


def check_other_optimizers_are_refused() -> None:
    for optimizer in (keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)):
        try:
            hvd.DistributedOptimizer(optimizer)
        except NotImplementedError as error:
            name = type(optimizer).__name__
            assert f"use keras.optimizers.legacy.{name}" in str(error), error
        else:
            raise AssertionError("it cannot train")
