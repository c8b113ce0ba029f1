"""Steps of Keras 3's optimizers: what codecs hold back in them, and parameters averaged in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import gradient_settings as settings
import keras
import numpy as np
from keras_training import IN_FUNCTIONS, arrays_of, assert_same_everywhere, within_function

import perseus.keras as hvd

Train = Callable[[list[settings.Arrays]], list[settings.Arrays]]
SetRate = Callable[[keras.optimizers.Optimizer, int], None]

SCALE = 2.0**10


class _Training:
    """Parameters from zero, and steps with given gradients.

    passes: each step's gradients are the sum, or the mean, of those of so many calls.
    scales: by a LossScaleOptimizer, which skips a call before each step: rank 1 gets an Inf.
    spoils: rank 1 gets a NaN in a call before each step, which the settings have ranks skip.
    set_rate: called with the number of the next step.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        in_function: bool = False,
        *,
        passes: int = 1,
        scales: bool = False,
        spoils: bool = False,
        set_rate: SetRate = lambda *_: None,
        **options: object,
    ) -> None:
        self.variables = [keras.Variable(np.zeros(s, "float32"), name="v") for s in settings.SHAPES]
        self.distributed = hvd.DistributedOptimizer(optimizer, **options)
        self.passes, self.scales, self.spoils = passes, scales, spoils
        self.set_rate = set_rate
        self.optimizer = self.distributed
        if scales:
            self.optimizer = keras.optimizers.LossScaleOptimizer(
                self.distributed, initial_scale=SCALE, dynamic_growth_steps=1
            )
        self.averages = bool(optimizer.gradient_accumulation_steps)
        self._apply = within_function(self._call) if in_function else self._call

    def _call(self, *gradients) -> None:
        self.optimizer.apply(list(gradients), self.variables)

    def _give(self, arrays: settings.Arrays) -> None:
        self._apply(*map(keras.ops.convert_to_tensor, arrays))

    def step(self, arrays: settings.Arrays) -> None:
        if self.scales or self.spoils:
            spoilt = [array.copy() for array in arrays]
            spoilt[0][0] = (np.inf if self.scales else np.nan) if hvd.rank() == 1 else 1.0
            self._give(spoilt)
        if self.scales:
            scale = float(keras.ops.convert_to_numpy(self.optimizer.dynamic_scale))
            arrays = [array * np.float32(scale) for array in arrays]
        for _ in range(self.passes - 1):
            self._give([np.ones_like(array) for array in arrays])
        others = self.passes - 1
        factor = self.passes if self.averages else 1
        self._give([factor * array - others for array in arrays])

    def __call__(self, given: list[settings.Arrays]) -> list[settings.Arrays]:
        results = []
        for number, arrays in enumerate(given):
            self.set_rate(self.optimizer, number)
            self.step(arrays)
            results.append([array.copy() for array in arrays_of(self.variables)])
        return results


def _sgd(**options: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.125, **options)


class _Slopes(keras.layers.Layer):
    """The sum of parameters times inputs, which are thus the gradients."""

    def build(self, *_) -> None:
        self.parameters = [
            self.add_weight(shape=shape, initializer="zeros") for shape in settings.SHAPES
        ]

    def call(self, inputs):
        axes = [tuple(range(1, 1 + len(shape))) for shape in settings.SHAPES]
        products = zip(inputs, self.parameters, axes, strict=True)
        return sum(keras.ops.sum(x * w, axis=axis) for x, w, axis in products)


class _Watch(keras.callbacks.Callback):
    """before(optimizer, step) is called before each batch; results has the parameters after it."""

    def __init__(self, before: SetRate) -> None:
        super().__init__()
        self._before = before
        self.results: list[settings.Arrays] = []

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self._before(self.model.optimizer, batch)

    def on_train_batch_end(self, batch, logs=None) -> None:
        values = arrays_of(self.model.trainable_variables)
        self.results.append([array.copy() for array in values])


def _fitting(
    make: Callable[[], keras.optimizers.Optimizer], before: SetRate = lambda *_: None
) -> Train:
    """A training by fit, one batch a step."""

    def train(given: list[settings.Arrays]) -> list[settings.Arrays]:
        inputs = [keras.Input(shape) for shape in settings.SHAPES]
        model = keras.Model(inputs, _Slopes()(inputs))
        optimizer = hvd.DistributedOptimizer(make())
        model.compile(optimizer, loss=lambda _, sums: keras.ops.mean(sums))
        watch = _Watch(before)
        x = [np.stack(arrays) for arrays in zip(*given, strict=True)]
        y = np.zeros(len(given), "float32")
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[watch])
        return watch.results

    return train


def check_parameters_are_averaged_after_the_step() -> None:
    for in_function in IN_FUNCTIONS:

        def train(given: list[settings.Arrays], in_function=in_function) -> list[settings.Arrays]:
            training = _Training(_sgd(), in_function)
            results = training(given)
            hvd.synchronize_parameters()
            assert_same_everywhere(training.variables)
            return results

        settings.rotation_of_parameters(train, after=True)


def check_fit_averages_parameters_after_the_step() -> None:
    settings.rotation_of_parameters(_fitting(_sgd), after=True, parts_of_all=(3,))


def check_parts_of_a_model_that_are_trained_in_turn_are_averaged() -> None:
    """As in a GAN, or where the second part is frozen at first. Averaging keeps the mean."""
    gan, unfrozen = [[0], [1]] * 4, [[0]] * 3 + [[0, 1]] * 2
    for trained, last in ((gan, [[0], [1]] * 3), (unfrozen, [[0, 1]] * 3)):
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            variables = _Training(_sgd()).variables
            optimizer = hvd.DistributedOptimizer(_sgd())
            optimizer.build(variables)
            expected = [np.zeros(shape) for shape in settings.SHAPES]
            for step, indices in enumerate(trained + last):
                moves = step < len(trained)  # the last steps change nothing but by averages
                given = [settings.whole(rank, step) for rank in range(hvd.size())]
                mine = given[hvd.rank()]
                gradients = [keras.ops.convert_to_tensor(mine[i] * moves) for i in indices]
                optimizer.apply(gradients, [variables[i] for i in indices])
                for i in indices:
                    expected[i] -= moves * np.mean([arrays[i] for arrays in given], axis=0) / 8
            for value, mean in zip(arrays_of(variables), expected, strict=True):
                assert np.abs(value - mean).max() < 1e-5


def check_calls_without_a_step_take_no_turn() -> None:
    """Whether passes are summed up or a rank has an Inf or a NaN, all ranks do the same."""
    for in_function in IN_FUNCTIONS:
        skip = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
        with settings.world_with(**skip):
            settings.rotation_of_parameters(
                _Training(_sgd(), in_function, spoils=True), after=True, parts_of_all=(3,)
            )
        for make, options in (
            (_sgd, {"passes": 2, "backward_passes_per_step": 2}),
            (lambda: _sgd(gradient_accumulation_steps=2), {"passes": 2}),
            (_sgd, {"scales": True}),
        ):

            def train(
                given: list[settings.Arrays], make=make, options=options, in_function=in_function
            ) -> list[settings.Arrays]:
                return _Training(make(), in_function, **options)(given)

            settings.rotation_of_parameters(train, after=True, parts_of_all=(3,))


def check_local_variables_are_not_averaged() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _Training(_sgd(), IN_FUNCTIONS[-1], scale_local_gradients=False)
        training.distributed.register_local_var(training.variables[0])
        given = [settings.whole(hvd.rank(), step) for step in range(5)]
        results = training(given)
        own = -sum(arrays[0] for arrays in given) / 8
        np.testing.assert_array_equal(results[-1][0], own)
        hvd.synchronize_parameters()
        values = arrays_of(training.variables)
        np.testing.assert_array_equal(values[0], own)
        settings.assert_same_everywhere(values[1:])


def _set_rate(optimizer: keras.optimizers.Optimizer, step: int) -> None:
    optimizer.learning_rate = settings.RATES[step]
    settings.flush_before_last(step)


def _flush(_: keras.optimizers.Optimizer, step: int) -> None:
    settings.flush_before_last(step)


def _schedule() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        list(range(len(settings.RATES) - 1)), list(settings.RATES)
    )


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """By the rate of its own step, whatever the rate is when it arrives."""
    for in_function in IN_FUNCTIONS:
        for make, options in (
            (_sgd, {}),
            (_sgd, {"groups": 1}),
            (_sgd, {"passes": 2, "backward_passes_per_step": 2}),
            (lambda: _sgd(gradient_accumulation_steps=2), {"passes": 2}),
            (_sgd, {"scales": True}),
        ):

            def train(
                given: list[settings.Arrays], make=make, options=options, in_function=in_function
            ) -> list[settings.Arrays]:
                return _Training(make(), in_function, set_rate=_set_rate, **options)(given)

            settings.learning_rates(train)

        def with_momentum(
            given: list[settings.Arrays], in_function=in_function
        ) -> list[settings.Arrays]:
            optimizer = _sgd(momentum=0.5)
            found = _Training(optimizer, in_function, set_rate=_set_rate)(given)
            before = [[np.zeros(shape) for shape in settings.SHAPES], *found]
            return [  # what gradients alone have moved
                [value - 0.5 * last for value, last in zip(*arrays, strict=True)]
                for arrays in zip(found, before, strict=False)
            ]

        settings.learning_rates(with_momentum)

        def by_schedule(
            given: list[settings.Arrays], in_function=in_function
        ) -> list[settings.Arrays]:
            optimizer = keras.optimizers.SGD(_schedule())
            return _Training(optimizer, in_function, set_rate=_flush)(given)

        settings.learning_rates(by_schedule)


def check_fit_tells_rates() -> None:
    """Of a variable, and of a schedule; on PyTorch, reductions begin during backward."""
    settings.learning_rates(_fitting(_sgd, _set_rate))
    settings.learning_rates(_fitting(lambda: keras.optimizers.SGD(_schedule()), _flush))


class Derived(keras.optimizers.SGD):
    pass


def check_other_optimizers_tell_no_rates() -> None:
    """Their steps may not be proportional to rate and gradient."""
    for make in (
        lambda: Derived(0.125),
        lambda: _sgd(clipvalue=1e6),
        lambda: _sgd(clipnorm=1e6),
        lambda: _sgd(global_clipnorm=1e6),
    ):

        def train(given: list[settings.Arrays], make=make) -> list[settings.Arrays]:
            return _Training(make(), IN_FUNCTIONS[-1], set_rate=_set_rate)(given)

        settings.learning_rates(train, known=False)
