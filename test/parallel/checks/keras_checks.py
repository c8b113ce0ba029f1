"""DistributedOptimizer.apply() and the functions of Keras 3, on the framework that is installed."""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import keras
import numpy as np
from keras_training import (
    IN_FUNCTIONS,
    arrays_of,
    assert_close,
    assert_like_plain,
    assert_same_everywhere,
    count_operations,
    make_gradient,
    make_gradients,
    make_model,
    make_variables,
    message_of,
    within_function,
)
from worlds import world_with

import perseus.keras as hvd
from perseus.compression import Compressor


def check_steps_are_those_of_the_mean_gradient() -> None:
    optimizers = keras.optimizers
    for make in (
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: optimizers.Adam(0.01, global_clipnorm=0.5),
        lambda: optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
        lambda: optimizers.RMSprop(0.01, clipvalue=0.2),
    ):
        assert_like_plain(hvd.DistributedOptimizer(make()), make())
    schedule = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert_like_plain(hvd.DistributedOptimizer(optimizers.SGD(schedule)), optimizers.SGD(schedule))


def check_the_options_of_the_reduction() -> None:
    make = keras.optimizers.SGD
    total = make(0.1 * hvd.size())
    assert_like_plain(hvd.DistributedOptimizer(make(0.1), op=hvd.Sum), total)
    assert_like_plain(hvd.DistributedOptimizer(make(0.1), gradient_predivide_factor=2.0), make(0.1))
    assert_like_plain(hvd.DistributedOptimizer(make(0.1), num_groups=3), make(0.1))

    for base in (Compressor, hvd.Compression.none, hvd.Compression.fp16, object):

        class Doubled(base):
            """Seen by the core twice as large; comes back one larger."""

            compress = staticmethod(lambda tensor: (tensor * 2, "context"))
            decompress = staticmethod(lambda tensor, ctx: tensor / 2 + (ctx == "context"))

        variables, reference = make_variables(), make_variables()
        hvd.DistributedOptimizer(make(0.1), compression=Doubled).apply(make_gradients(0), variables)
        make(0.1).apply([g + 1.0 for g in make_gradients(0, -1)], reference)
        assert_close(variables, reference)
    for compression in (hvd.Compression.fp16, hvd.Compression.int8, hvd.Compression.auto):
        assert_like_plain(hvd.DistributedOptimizer(make(0.1), compression=compression), make(0.1))


def check_groups_are_one_operation_each() -> None:
    variables = make_variables()
    groups = [[variables[2], variables[0]]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=groups)
    reference = make_variables()
    for step in range(3):
        optimizer.apply(make_gradients(step), variables)
        keras.optimizers.SGD(0.1).apply(make_gradients(step, -1), reference)
    assert_close(variables, reference)


def check_some_gradients_stay_on_their_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = make_variables()
    for scale in (True, False):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(variables[1])
        before = arrays_of(variables)
        optimizer.apply(make_gradients(0), variables)
        steps = [a - b for a, b in zip(before, arrays_of(variables), strict=True)]
        means = make_gradients(0, -1)
        assert_close(steps[:1] + steps[2:], means[:1] + means[2:])
        np.testing.assert_allclose(
            steps[1], make_gradient(0, rank, 1) / (size if scale else 1), rtol=1e-5, atol=1e-5
        )
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    before = arrays_of(layer.weights)
    partial.apply([keras.ops.full(w.shape, 1.0 + rank) for w in layer.weights], layer.weights)
    for start, now in zip(before, arrays_of(layer.weights), strict=True):
        np.testing.assert_allclose(start - now, (1.0 + rank) / size, rtol=1e-5, atol=1e-6)


def check_local_layers_are_layers_with_weights() -> None:
    make, sgd = hvd.PartialDistributedOptimizer, keras.optimizers.SGD(1.0)
    for layer in (1, "dense", keras.layers.Dense):
        assert "expected Keras layers, got" in message_of(ValueError, make, sgd, local_layers=layer)
    layer = keras.layers.Dense(2, name="mine")
    text = message_of(ValueError, make, sgd, local_layers=[layer])
    assert text.startswith("[keras] local_layers: mine is not built"), text
    make(sgd, local_layers=None)


def check_a_variable_may_be_given_twice() -> None:
    """As tied weights of two models are, with the same gradient or with another one."""
    for other in (False, True):

        def train(optimizer, rank=None, in_function=False, other=other) -> list[np.ndarray]:
            variables = make_variables()
            optimizer.build(variables)

            def step(*gradients) -> None:
                again = gradients[-1 if other else 1]
                optimizer.apply([*gradients[:-1], again], [*variables, variables[1]])

            take = within_function(step) if in_function else step
            for number in range(3):
                take(*make_gradients(number, rank), make_gradients(number + 9, rank)[1])
            return arrays_of(variables)

        expected = train(keras.optimizers.Adam(0.01), -1)
        for in_function in IN_FUNCTIONS:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
            assert_close(train(optimizer, in_function=in_function), expected)


def check_every_variable_has_a_gradient() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    text = message_of(ValueError, optimizer.apply, make_gradients(0)[:3], make_variables())
    assert text == "[keras] apply() got 3 gradients for 4 variables", text


def check_a_norm_over_local_variables_is_refused() -> None:
    def apply(step: int = 0, register: bool = True, **options) -> None:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, **options))
        variables = make_variables()
        if register:
            optimizer.register_local_var(variables[1])
        optimizer.apply(make_gradients(step), variables)

    assert "use clipnorm or clipvalue" in message_of(ValueError, apply, global_clipnorm=0.5)
    apply(clipnorm=0.5)
    apply(global_clipnorm=0.5, register=False)


def check_sums_over_steps_refuse_local_variables() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        variables = make_variables()
        optimizer.register_local_var(variables[1])
        text = message_of(ValueError, optimizer.apply, make_gradients(0), variables)
        assert text.startswith("[keras] PERSEUS_ACCUMULATE_N_STEPS"), text


def check_a_process_set_of_ones_own_does_not_communicate() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        first = hvd.add_process_set([0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=first)
        variables, reference = make_variables(), make_variables()
        assert count_operations(lambda: optimizer.apply(make_gradients(0), variables)) == 0
        keras.optimizers.SGD(1.0).apply(make_gradients(0), reference)
        assert_close(variables, reference)
        hvd.remove_process_set(first)


def check_missing_gradients_stay_missing() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables, reference = make_variables(), make_variables()
    gradients, mean = make_gradients(0), make_gradients(0, -1)
    gradients[1] = mean[1] = None
    optimizer.apply(gradients, variables)
    keras.optimizers.SGD(1.0).apply(mean, reference)
    assert_close(variables, reference)


def check_gradients_may_be_arrays() -> None:
    """Optimizers without code of their own for PyTorch take arrays; nothing changes these."""
    for make in (lambda: keras.optimizers.Ftrl(0.1), lambda: keras.optimizers.Adafactor(0.1)):
        optimizer, plain = hvd.DistributedOptimizer(make()), make()
        variables, reference = make_variables(), make_variables()
        for step in range(2):
            given = [np.array(array) for array in arrays_of(make_gradients(step))]
            before = copy.deepcopy(given)
            optimizer.apply(given, variables)
            plain.apply(make_gradients(step, -1), reference)
            for array, right in zip(given, before, strict=True):
                assert np.array_equal(array, right), (array, right)
        assert_close(variables, reference)


def check_accumulated_gradients_travel_once_a_step() -> None:
    def make():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)

    optimizer, plain = hvd.DistributedOptimizer(make()), make()
    variables, reference = make_variables(), make_variables()
    counts = []
    for step in range(6):
        counts.append(count_operations(lambda: optimizer.apply(make_gradients(step), variables)))  # noqa: B023
        plain.apply(make_gradients(step, -1), reference)
        if step % 3 < 2:
            continue
        assert_close(variables, reference)
    assert [count > 0 for count in counts] == [False, False, True] * 2, counts
    assert_same_everywhere([*variables, *optimizer.variables])
    assert int(optimizer.iterations) == 2


def check_accumulated_gradients_of_scaled_losses() -> None:
    scale = 1024.0

    def make():
        return keras.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=3, loss_scale_factor=scale
        )

    optimizer, plain = hvd.DistributedOptimizer(make()), make()
    variables, reference = make_variables(), make_variables()
    for step in range(6):
        optimizer.apply([gradient * scale for gradient in make_gradients(step)], variables)
        plain.apply([gradient * scale for gradient in make_gradients(step, -1)], reference)
    assert_close(variables, reference)
    assert_same_everywhere([*variables, *optimizer.variables])


def check_backward_passes_are_summed_up() -> None:
    for average in (False, True):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        variables, reference = make_variables(), make_variables()
        for step in range(0, 4, 2):
            assert count_operations(lambda: optimizer.apply(make_gradients(step), variables)) == 0  # noqa: B023
            assert int(optimizer._agg_helper.counter) == 1
            optimizer.apply(make_gradients(step + 1), variables)
            pairs = zip(make_gradients(step, -1), make_gradients(step + 1, -1), strict=True)
            plain.apply([(a + b) / (2 if average else 1) for a, b in pairs], reference)
            assert_close(variables, reference)
        assert int(optimizer.iterations) == 4


def _trains_parts(in_function: bool) -> None:
    variables, reference = make_variables(), make_variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    optimizer.build(variables)

    def way_of(part: range) -> Callable[..., None]:
        def apply(*gradients) -> None:
            optimizer.apply(list(gradients), [variables[index] for index in part])

        return within_function(apply) if in_function else apply

    first, second, both = range(2), range(2, 4), range(4)
    ways = {part: way_of(part) for part in (first, second, both)}
    # Two parts in turn, then the first one while the second is frozen, then both together.
    for step, part in enumerate((first, second, first, second, first, first, both, both)):
        ways[part](*(make_gradients(step)[index] for index in part))
        mean = make_gradients(step, -1)
        keras.optimizers.SGD(0.1).apply(
            [mean[index] for index in part], [reference[index] for index in part]
        )
        if step >= 3 and step % 2:
            assert_close(variables, reference)
    assert int(optimizer.iterations) == 8


def check_passes_of_other_variables_are_counted_apart() -> None:
    for in_function in IN_FUNCTIONS:
        _trains_parts(in_function)


def check_no_pass_outlives_a_world_or_a_restore() -> None:
    """Whichever pass the ranks were in."""
    model = make_model()
    optimizer, plain = (keras.optimizers.SGD(0.1) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3)
    state = hvd.elastic.KerasState(model, optimizer)
    variables = model.trainable_variables
    reference = [keras.Variable(value) for value in arrays_of(variables)]

    def gradients(step: int, rank: int) -> list:
        return [keras.ops.full(v.shape, float(i + rank + step)) for i, v in enumerate(variables)]

    def begin() -> None:
        for _ in range(1 + hvd.rank() % 2):
            optimizer.apply(gradients(9, hvd.rank()), variables)

    def go_on() -> None:
        for step in range(3):
            optimizer.apply(gradients(step, hvd.rank()), variables)
        ranks = range(hvd.size())
        given = [gradients(step, rank) for step in range(3) for rank in ranks]
        means = [sum(parts) / hvd.size() for parts in zip(*given, strict=True)]
        plain.apply(means, reference)
        assert_close(variables, reference)

    begin()
    with world_with():
        go_on()
        state.save()
        begin()
        state.restore()
        go_on()


def check_a_rank_that_trains_alone_sums_up_passes() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        first = hvd.add_process_set([0])  # rank 0 is alone in it, the others are outside of it
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2, process_set=first
        )
        optimizer.register_local_var((variables := make_variables())[1])
        plain, reference = keras.optimizers.SGD(0.1, momentum=0.9), make_variables()
        for step in range(0, 4, 2):
            before = arrays_of(variables)
            optimizer.apply(make_gradients(step), variables)
            assert all(map(np.array_equal, before, arrays_of(variables)))
            after = make_gradients(step + 1)
            assert count_operations(lambda: optimizer.apply(after, variables)) == 0  # noqa: B023
            pairs = zip(make_gradients(step), after, strict=True)
            plain.apply([a + b for a, b in pairs], reference)
            assert_close(variables, reference)
        assert int(optimizer.iterations) == 4
        hvd.remove_process_set(first)


def check_averages_of_variables_begin_with_their_values() -> None:
    def train(**options) -> None:
        momentum = 0.75
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=momentum), **options
        )
        variables = make_variables()
        optimizer.build(variables)
        for variable in variables:  # as a broadcast or a file does
            variable.assign(variable * 3.0)
        expected = arrays_of(variables)
        for step in range(6):
            optimizer.apply(make_gradients(step), variables)
            if step % 2:
                pairs = zip(expected, arrays_of(variables), strict=True)
                expected = [momentum * a + (1 - momentum) * b for a, b in pairs]
            assert_close(optimizer._model_variables_moving_average, expected)

    train(backward_passes_per_step=2)
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        train()


def check_values_in_place_of_gradients_are_maxima() -> None:
    """As of the scales of float8: the second variable and the third."""
    rank, size = hvd.rank(), hvd.size()

    def new_values(step: int, index: int, each: int) -> np.ndarray:
        return np.abs(make_gradient(step, each, index))

    def train(passes: int, steps: int, **options) -> None:
        accumulates = options.pop("accumulates", None)
        plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulates)
        optimizer = hvd.DistributedOptimizer(plain, **options)
        variables, before = make_variables(), arrays_of(make_variables())
        for index in (1, 2):
            variables[index].overwrite_with_gradient = True
        for step in range(steps):
            given = make_gradients(step)
            for index in (1, 2):
                given[index] = keras.ops.convert_to_tensor(new_values(step, index, rank))
            optimizer.apply(given, variables)
        for index in (1, 2):
            values = [
                new_values(step, index, each)
                for step in range(steps - passes, steps)
                for each in range(size)
            ]
            np.testing.assert_array_equal(arrays_of(variables)[index], np.max(values, axis=0))
        assert not np.array_equal(arrays_of(variables)[0], before[0])
        assert_same_everywhere(variables)

    train(1, 2)
    train(1, 2, groups=1, compression=hvd.Compression.int8)
    for average in (False, True):
        train(2, 4, backward_passes_per_step=2, average_aggregated_gradients=average)
    train(2, 4, accumulates=2)
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        train(1, 4)


def check_the_core_sums_up_over_steps() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=3):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.02])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(schedule, momentum=0.9))
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        variables, reference = make_variables(), make_variables()
        for step in range(6):
            before = arrays_of(variables)
            optimizer.apply(make_gradients(step), variables)
            if step % 3 < 2:
                assert all(map(np.array_equal, before, arrays_of(variables)))
                continue
            sums = zip(*(make_gradients(step - back, -1) for back in (2, 1, 0)), strict=True)
            # The schedule counts calls, the first of which is number 0.
            plain.learning_rate = 0.1 if step == 2 else 0.02
            plain.apply([a + b + c for a, b, c in sums], reference)
            assert_close(variables, reference)
        assert int(optimizer.iterations) == 6


def check_optimizers_of_old_and_new_ranks_find_each_other() -> None:
    """In a later world, in which a new process has used fewer optimizers before."""
    make = keras.optimizers.SGD
    first, second = hvd.DistributedOptimizer(make(0.1)), hvd.DistributedOptimizer(make(0.1))
    variables, reference = make_variables(), make_variables()
    plain = make(0.1)
    for number, optimizer in enumerate((first, second)):
        optimizer.apply(make_gradients(number), variables)
        plain.apply(make_gradients(number, -1), reference)
    with world_with():
        if hvd.rank() == hvd.size() - 1:
            second = hvd.DistributedOptimizer(make(0.1))  # as a new process
        second.apply(make_gradients(2), variables)
        plain.apply(make_gradients(2, -1), reference)
        assert_close(variables, reference)
        assert_same_everywhere(variables)


def check_missing_gradients_count_as_zeros_in_sums_over_steps() -> None:
    """Each rank may miss others, also in the first step, or all."""
    rank, last = hvd.rank(), hvd.size() - 1
    missing = [{0: {1}, last: {2}}, {last: {0, 1, 2, 3}}, {0: {0}, last: {0}}, {}]
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        optimizer, plain = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(optimizer)
        variables, reference = make_variables(), make_variables()
        sums = [np.zeros(variable.shape, "float32") for variable in variables]
        for step, absent in enumerate(missing):
            mine = absent.get(rank, set())
            given = [None if i in mine else g for i, g in enumerate(make_gradients(step))]
            optimizer.apply(given, variables)
            for each in range(hvd.size()):
                for i, gradient in enumerate(arrays_of(make_gradients(step, each))):
                    if i not in absent.get(each, set()):
                        sums[i] += gradient / hvd.size()
            if step % 2:
                plain.apply(list(map(keras.ops.convert_to_tensor, sums)), reference)
                assert_close(variables, reference)
                sums = [np.zeros_like(total) for total in sums]
        assert int(optimizer.iterations) == 4


def check_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    with world_with(PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip"):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        plain = keras.optimizers.Adam(0.01)
        variables, reference = make_variables(), make_variables()
        for step in range(3):
            gradients = make_gradients(step)
            if step == 1:
                if hvd.rank() == hvd.size() - 1:
                    gradients[2] = gradients[2] * float("nan")
                before = arrays_of(variables)
                optimizer.apply(gradients, variables)
                assert all(map(np.array_equal, before, arrays_of(variables)))
                continue
            optimizer.apply(gradients, variables)
            plain.apply(make_gradients(step, -1), reference)
        assert_close(variables, reference)
        assert int(optimizer.iterations) == 2


def _loss_scaled(inner, steps: int | None = None) -> None:
    """One rank's gradients are infinite in step 1; the step is left out everywhere."""
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=100)
    variables = make_variables()
    moved = []
    for step in range(4):
        scaled = [g * outer.dynamic_scale if outer.built else g * 8.0 for g in make_gradients(step)]
        if step == 1 and hvd.rank() == hvd.size() - 1:
            scaled[0] = scaled[0] * float("inf")
        before = arrays_of(variables)
        outer.apply(scaled, variables)
        moved.append(not all(map(np.array_equal, before, arrays_of(variables))))
        assert float(outer.dynamic_scale) == (8.0 if step < 1 else 4.0)
    # With two calls a step: 0 and 2 make one, 3 is the first of the next.
    assert moved == ([False, False, True, False] if steps else [True, False, True, True]), moved
    # What has been summed up of the next step is each rank's own.
    assert_same_everywhere(variables if steps else [*variables, *outer.variables])


def check_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    sgd = keras.optimizers.SGD
    _loss_scaled(hvd.DistributedOptimizer(sgd(0.1, momentum=0.9)))
    _loss_scaled(hvd.DistributedOptimizer(sgd(0.1, gradient_accumulation_steps=2)), 2)
    # An optimizer that is not distributed is as it was.
    alone = keras.optimizers.LossScaleOptimizer(sgd(0.1))
    assert count_operations(lambda: alone.apply(make_gradients(0), make_variables())) == 0
    outer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(1.0), 4.0))
    variables, reference = make_variables(), make_variables()
    outer.apply([g * 4.0 for g in make_gradients(0)], variables)
    sgd(1.0).apply(make_gradients(0, -1), reference)
    assert_close(variables, reference)


def _uneven(in_function: bool) -> None:
    """The last rank joins after its only step; others skip theirs only for their own Inf."""
    rank, size = hvd.rank(), hvd.size()
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=100)
    variables = make_variables()
    outer.build(variables)

    def take(gradients: list) -> None:
        outer.apply(gradients, variables)

    step_with = within_function(take) if in_function else take
    for step in range(1 if rank == size - 1 else 4):
        before = arrays_of(variables)
        scale = 8.0 if step < 3 else 4.0
        assert float(outer.dynamic_scale) == scale, (step, float(outer.dynamic_scale))
        gradients = [gradient * scale for gradient in make_gradients(step)]
        if step == 2 and rank == 0:
            gradients[0] = gradients[0] * float("inf")
        step_with(gradients)
        ranks = range(size if step == 0 else size - 1)
        for index, (start, now) in enumerate(zip(before, arrays_of(variables), strict=True)):
            total = np.sum([make_gradient(step, r, index) for r in ranks], axis=0)
            expected = 0.0 if step == 2 else total / size
            np.testing.assert_allclose(start - now, expected, rtol=1e-5, atol=1e-5)
    assert int(inner.iterations) == (1 if rank == size - 1 else 3)
    importlib.import_module(f"perseus.{keras.backend.backend()}.horovod").join()


def check_loss_scaling_goes_on_after_a_rank_has_joined() -> None:
    for in_function in IN_FUNCTIONS:
        _uneven(in_function)


class _Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot serialize, as of its tutorial on Transformers."""

    def __init__(self, width: float) -> None:
        self.width = width

    def __call__(self, step):
        return self.width / (keras.ops.cast(step, "float32") + 10.0)


class _WithConfig(_Warmup):
    """Keras can serialize it, but not find it."""

    def get_config(self):
        return {"width": self.width}


class _Heavy(keras.optimizers.SGD):
    def __init__(self, learning_rate: float = 0.1, weight: float = 1.0, **options) -> None:
        super().__init__(learning_rate, **options)
        self.weight = weight


class _Forgetful(_Heavy):
    def get_config(self):
        raise KeyError("weight")


def check_any_learning_rate_is_taken_over() -> None:
    sgd = keras.optimizers.SGD
    for rate in (_Warmup(2.0), _WithConfig(2.0), lambda: 0.3):
        given = sgd(rate, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(given)
        assert optimizer._learning_rate is given._learning_rate is rate
        assert_like_plain(optimizer, given)
        optimizer = hvd.DistributedOptimizer(given)  # which has begun
        assert optimizer._learning_rate is rate
        assert int(optimizer.iterations) == 3
        inner = sgd(rate)
        outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
        outer = hvd.DistributedOptimizer(outer)
        assert outer.inner_optimizer._learning_rate is rate
        assert outer.initial_scale == 4.0
        variables, reference = make_variables(), make_variables()
        outer.apply([g * 4.0 for g in make_gradients(0)], variables)
        inner.apply(make_gradients(0, -1), reference)
        assert_close(variables, reference)


def _multi(variables: list, **options) -> keras.optimizers.Optimizer:
    """A MultiOptimizer whose function chooses by the number of dimensions."""
    decaying = keras.optimizers.SGD(0.1, weight_decay=0.5)
    decaying.exclude_from_weight_decay(var_list=variables[:1])
    inner = [decaying, keras.optimizers.SGD(0.1, momentum=0.9, **options)]
    return keras.optimizers.MultiOptimizer(lambda variable: inner[len(variable.shape) % 2])


def check_a_multi_optimizer_keeps_its_inner_ones() -> None:
    variables, reference = make_variables(), make_variables()
    optimizer, plain = hvd.DistributedOptimizer(_multi(variables)), _multi(reference)
    for step in range(2):
        optimizer.apply(make_gradients(step), variables)
        plain.apply(make_gradients(step, -1), reference)
        assert_close(variables, reference)
    begun = hvd.DistributedOptimizer(plain)
    assert begun.optimizers == plain.optimizers
    optimizer.apply(make_gradients(2), variables)
    begun.apply(make_gradients(2), reference)
    assert_close(variables, reference)
    shared = keras.optimizers.SGD(0.1)
    kinds = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), {"a": shared, "b": shared})
    multi = hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(kinds))
    assert multi.optimizers == [shared, kinds.default_optimizer]


def check_inner_optimizers_count_calls_and_refuse_norms_of_local_variables() -> None:
    variables = make_variables()
    optimizer = hvd.DistributedOptimizer(_multi(variables), backward_passes_per_step=2)
    for step in range(4):
        optimizer.apply(make_gradients(step), variables)
    assert [int(inner.iterations) for inner in optimizer.optimizers] == [4, 4]

    def apply(local: slice) -> None:
        variables = make_variables()
        optimizer = hvd.DistributedOptimizer(_multi(variables, global_clipnorm=0.5))
        for variable in variables[local]:
            optimizer.register_local_var(variable)
        optimizer.apply(make_gradients(0), variables)

    assert "use clipnorm or clipvalue" in message_of(ValueError, apply, slice(1, 2))
    apply(slice(0, 1))  # whose optimizer does not clip


def check_only_one_of_two_ways_to_sum_gradients_is_taken() -> None:
    kinds = keras.optimizers

    def refused(optimizer) -> str:
        """Return the error of an optimizer that is wrapped, or else of its first step."""

        def apply() -> None:
            made = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3)
            made.apply(make_gradients(0), make_variables())

        return message_of(ValueError, apply)

    inner = kinds.SGD(0.1, gradient_accumulation_steps=2, name="inner")
    message = message_of(ValueError, hvd.DistributedOptimizer, inner, backward_passes_per_step=3)
    assert message.startswith("[keras] backward_passes_per_step=3 for an optimizer (inner)")
    assert "has gradient_accumulation_steps=2: " in message
    assert message.endswith("use only one of the two")
    for outer in (
        kinds.LossScaleOptimizer(inner),
        kinds.MultiOptimizer(kinds.OptimizerMap(kinds.Adam(), {"v": inner})),
        kinds.MultiOptimizer(lambda variable: inner if variable.shape else kinds.Adam()),
    ):
        assert refused(outer) == message
    # Each of them alone is as it was.
    hvd.DistributedOptimizer(inner)
    hvd.DistributedOptimizer(kinds.SGD(0.1), backward_passes_per_step=3)


def check_a_config_that_lacks_arguments_is_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedOptimizer(_Heavy(weight=3.0))
    (text,) = [str(each.message) for each in caught if "[keras]" in str(each.message)]
    assert "_Heavy.get_config() lacks weight, so" in text
    text = message_of(ValueError, hvd.DistributedOptimizer, _Forgetful())
    assert "could not copy the _Forgetful by its get_config(): 'weight'; let" in text


def check_an_optimizer_that_has_begun_goes_on() -> None:
    plain, reference = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
    variables, others = make_variables(), make_variables()
    for optimizer, mine in ((plain, variables), (reference, others)):
        optimizer.apply(make_gradients(0, 0), mine)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.apply(make_gradients(1), variables)
    reference.apply(make_gradients(1, -1), others)
    assert_close(variables, others)
    assert int(optimizer.iterations) == 2


def _is_distributed(optimizer) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "register_local_var")


def check_copies_are_distributed() -> None:
    kinds = keras.optimizers
    for make in (
        lambda: kinds.SGD(0.1),
        lambda: kinds.Adam(kinds.schedules.ExponentialDecay(0.1, 2, 0.5), clipnorm=0.5),
        lambda: kinds.LossScaleOptimizer(kinds.Adam(0.1), initial_scale=1.0),
        lambda: kinds.MultiOptimizer(kinds.OptimizerMap(kinds.SGD(0.1, momentum=0.9))),
    ):
        plain, optimizer = make(), hvd.DistributedOptimizer(make(), op=hvd.Sum)
        for begun in (False, True):
            if begun:
                optimizer.apply(make_gradients(0), make_variables())
                plain.apply(make_gradients(0, -1), make_variables())
            for copied in (copy.copy, copy.deepcopy):
                mine, right = copied(optimizer), copied(plain)
                assert _is_distributed(mine)
                # As much of the state as Keras copies, which is not all of it.
                assert mine.built == right.built
                assert int(mine.iterations) == int(right.iterations)
                variables, reference = make_variables(), make_variables()
                for step in range(2):
                    mine.apply(make_gradients(step), variables)
                    total = [gradient * hvd.size() for gradient in make_gradients(step, -1)]
                    right.apply(total, reference)
                assert_close(variables, reference)
                assert_same_everywhere(variables)
    alone = copy.deepcopy(kinds.LossScaleOptimizer(kinds.SGD(0.1)))
    assert not _is_distributed(alone)


def check_copies_keep_local_variables_and_passes() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    variables, reference = make_variables(), make_variables()
    optimizer.register_local_var(variables[1])
    optimizer.apply(make_gradients(0), variables)  # the first of two passes
    again = copy.deepcopy(optimizer)
    for step in (1, 2):
        again.apply(make_gradients(step), variables)
    sums, own = (
        [a + b for a, b in zip(make_gradients(1, rank), make_gradients(2, rank), strict=True)]
        for rank in (-1, hvd.rank())
    )
    sums[1] = own[1] / hvd.size()
    keras.optimizers.SGD(1.0).apply(sums, reference)
    assert_close(variables, reference)


def check_arguments_that_do_not_fit() -> None:
    sgd = keras.optimizers.SGD
    make = hvd.DistributedOptimizer
    assert "Adasum" in message_of(ValueError, make, sgd(), op=hvd.Adasum)
    assert "Average" in message_of(
        ValueError, make, sgd(), op=hvd.Sum, gradient_predivide_factor=2.0
    )
    assert "already" in message_of(ValueError, make, make(sgd()))
    assert "expected an optimizer" in message_of(ValueError, make, "sgd")
    assert "backward_passes" in message_of(ValueError, make, sgd(), backward_passes_per_step=0)
    assert "groups" in message_of(ValueError, make, sgd(), groups=-1)
    assert "built" in message_of(ValueError, make(sgd()).apply, [keras.ops.ones(2)])
    for steps in (None, 2):
        optimizer = make(sgd(gradient_accumulation_steps=steps))
        optimizer.build(make_variables())
        text = message_of(ValueError, optimizer.apply, make_gradients(0), make_variables())
        assert "Unknown variable" in text
    text = message_of(ValueError, hvd.allreduce, 1.0, average=True, op=hvd.Sum)
    assert "supersedes" in text


def check_functions_on_values() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = hvd.allreduce(np.full(3, float(rank)), name="mean")
    assert keras.ops.convert_to_numpy(mean).tolist() == [(size - 1) / 2] * 3
    total = hvd.allreduce(np.full(3, rank, np.int64), op=hvd.Sum, postscale_factor=2.0)
    assert keras.ops.convert_to_numpy(total).tolist() == [size * (size - 1)] * 3
    rows = hvd.allgather(np.full((rank + 1, 2), rank, np.int32))
    expected = [[r, r] for r in range(size) for _ in range(r + 1)]
    assert keras.ops.convert_to_numpy(rows).tolist() == expected
    assert int(hvd.broadcast(np.array([rank + 5]), size - 1)[0]) == size + 4
    part = hvd.reducescatter(np.arange(2.0 * size) * (rank + 1), op=hvd.Sum)
    factor = size * (size + 1) / 2
    assert keras.ops.convert_to_numpy(part).tolist() == [2 * rank * factor, (2 * rank + 1) * factor]
    assert (
        "BroadcastGlobalVariablesCallback"
        in message_of(RuntimeError, hvd.broadcast_global_variables, 0)
        or keras.backend.backend() == "tensorflow"
    )
