"""DistributedOptimizer of Keras 3, on the framework that is installed."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import keras
import numpy as np
from worlds import world_with

import perseus
import perseus.keras as hvd
from perseus.compression import Compressor

SHAPES = [(4, 3), (3,), (2, 2, 2), ()]


def _raised(kind: type[BaseException], function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def _variables(start: float = 1.0) -> list[keras.Variable]:
    return [keras.Variable(np.full(shape, start, "float32"), name="v") for shape in SHAPES]


def _gradient(step: int, rank: int, index: int) -> np.ndarray:
    return np.random.default_rng([step, rank, index]).normal(size=SHAPES[index]).astype("float32")


def _gradients(step: int, rank: int | None = None) -> list:
    """Those of a rank, this one unless it is given; -1: their mean over all ranks."""
    ranks = range(hvd.size()) if rank == -1 else [hvd.rank() if rank is None else rank]
    return [
        keras.ops.convert_to_tensor(
            np.mean([_gradient(step, r, i) for r in ranks], axis=0, dtype=np.float32)
        )
        for i in range(len(SHAPES))
    ]


def _numbers(variables) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _close(actual, expected, tolerance: float = 1e-5) -> None:
    for mine, right in zip(_numbers(actual), _numbers(expected), strict=True):
        np.testing.assert_allclose(mine, right, rtol=tolerance, atol=tolerance)


def _same_everywhere(values) -> None:
    """The same bits on all ranks."""
    for index, mine in enumerate(_numbers(values)):
        root = hvd.broadcast(mine.astype(mine.dtype, copy=True), 0, name=f"same.{index}")
        assert np.array_equal(mine, keras.ops.convert_to_numpy(root)), index


def _operations(function) -> int:
    """How many operations the core has done meanwhile."""
    before = perseus.stats()["operations"]
    function()
    return perseus.stats()["operations"] - before


def _against_plain(optimizer, plain, steps: int = 3, mine=_gradients) -> None:
    """Steps on every rank's gradients against plain ones on the mean over ranks."""
    variables, reference = _variables(), _variables()
    for step in range(steps):
        optimizer.apply(mine(step), variables)
        plain.apply(_gradients(step, -1), reference)
    _close(variables, reference)
    _same_everywhere([*variables, *optimizer.variables])


def _model(seed: int = 0, **options):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, "tanh", **options), layers.Dense(3, **options)]
    )


def _data(rank: int, count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(100 + rank)
    x = random.normal(size=(count, 6)).astype("float32")
    return x, np.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3] + x[:, 4]], axis=1)


def check_steps_are_those_of_the_mean_gradient() -> None:
    optimizers = keras.optimizers
    for make in (
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: optimizers.Adam(0.01, global_clipnorm=0.5),
        lambda: optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
        lambda: optimizers.RMSprop(0.01, clipvalue=0.2),
    ):
        _against_plain(hvd.DistributedOptimizer(make()), make())
    schedule = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    _against_plain(hvd.DistributedOptimizer(optimizers.SGD(schedule)), optimizers.SGD(schedule))


def check_the_options_of_the_reduction() -> None:
    make = keras.optimizers.SGD
    total = make(0.1 * hvd.size())
    _against_plain(hvd.DistributedOptimizer(make(0.1), op=hvd.Sum), total)
    _against_plain(hvd.DistributedOptimizer(make(0.1), gradient_predivide_factor=2.0), make(0.1))
    _against_plain(hvd.DistributedOptimizer(make(0.1), num_groups=3), make(0.1))

    class Doubled(Compressor):
        """Seen by the core twice as large; comes back one larger."""

        compress = staticmethod(lambda tensor: (tensor * 2, "context"))
        decompress = staticmethod(lambda tensor, ctx: tensor / 2 + (ctx == "context"))

    variables, reference = _variables(), _variables()
    hvd.DistributedOptimizer(make(0.1), compression=Doubled).apply(_gradients(0), variables)
    make(0.1).apply([g + 1.0 for g in _gradients(0, -1)], reference)
    _close(variables, reference)
    for compression in (hvd.Compression.fp16, hvd.Compression.int8, hvd.Compression.auto):
        _against_plain(hvd.DistributedOptimizer(make(0.1), compression=compression), make(0.1))


def check_groups_are_one_operation_each() -> None:
    variables = _variables()
    groups = [[variables[2], variables[0]]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=groups)
    reference = _variables()
    for step in range(3):
        optimizer.apply(_gradients(step), variables)
        keras.optimizers.SGD(0.1).apply(_gradients(step, -1), reference)
    _close(variables, reference)


def check_some_gradients_stay_on_their_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = _variables()
    for scale in (True, False):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(variables[1])
        before = _numbers(variables)
        optimizer.apply(_gradients(0), variables)
        steps = [a - b for a, b in zip(before, _numbers(variables), strict=True)]
        _close(steps[:1] + steps[2:], [g for i, g in enumerate(_gradients(0, -1)) if i != 1])
        np.testing.assert_allclose(
            steps[1], _gradient(0, rank, 1) / (size if scale else 1), rtol=1e-5, atol=1e-5
        )
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    before = _numbers(layer.weights)
    partial.apply([keras.ops.full(w.shape, 1.0 + rank) for w in layer.weights], layer.weights)
    for start, now in zip(before, _numbers(layer.weights), strict=True):
        np.testing.assert_allclose(start - now, (1.0 + rank) / size, rtol=1e-5, atol=1e-6)


def check_a_process_set_of_ones_own_does_not_communicate() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        first = hvd.add_process_set([0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=first)
        variables, reference = _variables(), _variables()
        assert _operations(lambda: optimizer.apply(_gradients(0), variables)) == 0
        keras.optimizers.SGD(1.0).apply(_gradients(0), reference)
        _close(variables, reference)
        hvd.remove_process_set(first)


def check_missing_gradients_stay_missing() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables, reference = _variables(), _variables()
    gradients, mean = _gradients(0), _gradients(0, -1)
    gradients[1] = mean[1] = None
    optimizer.apply(gradients, variables)
    keras.optimizers.SGD(1.0).apply(mean, reference)
    _close(variables, reference)


def check_accumulated_gradients_travel_once_a_step() -> None:
    def make():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)

    optimizer, plain = hvd.DistributedOptimizer(make()), make()
    variables, reference = _variables(), _variables()
    counts = []
    for step in range(6):
        counts.append(_operations(lambda: optimizer.apply(_gradients(step), variables)))  # noqa: B023
        plain.apply(_gradients(step, -1), reference)
        if step % 3 < 2:
            continue
        _close(variables, reference)
    assert [count > 0 for count in counts] == [False, False, True] * 2, counts
    _same_everywhere([*variables, *optimizer.variables])
    assert int(optimizer.iterations) == 2


def check_backward_passes_are_summed_up() -> None:
    for average in (False, True):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        variables, reference = _variables(), _variables()
        for step in range(0, 4, 2):
            assert _operations(lambda: optimizer.apply(_gradients(step), variables)) == 0  # noqa: B023
            assert int(optimizer._agg_helper.counter) == 1
            optimizer.apply(_gradients(step + 1), variables)
            pairs = zip(_gradients(step, -1), _gradients(step + 1, -1), strict=True)
            plain.apply([(a + b) / (2 if average else 1) for a, b in pairs], reference)
            _close(variables, reference)
        assert int(optimizer.iterations) == 4


def check_the_core_sums_up_over_steps() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=3):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        plain = keras.optimizers.Adam(0.01)
        variables, reference = _variables(), _variables()
        for step in range(6):
            before = _numbers(variables)
            optimizer.apply(_gradients(step), variables)
            if step % 3 < 2:
                assert all(map(np.array_equal, before, _numbers(variables)))
                continue
            sums = zip(*(_gradients(step - back, -1) for back in (2, 1, 0)), strict=True)
            plain.apply([a + b + c for a, b, c in sums], reference)
            _close(variables, reference)
        assert int(optimizer.iterations) == 2


def check_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    with world_with(PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip"):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        plain = keras.optimizers.Adam(0.01)
        variables, reference = _variables(), _variables()
        for step in range(3):
            gradients = _gradients(step)
            if step == 1:
                if hvd.rank() == hvd.size() - 1:
                    gradients[2] = gradients[2] * float("nan")
                before = _numbers(variables)
                optimizer.apply(gradients, variables)
                assert all(map(np.array_equal, before, _numbers(variables)))
                continue
            optimizer.apply(gradients, variables)
            plain.apply(_gradients(step, -1), reference)
        _close(variables, reference)
        assert int(optimizer.iterations) == 2


def _loss_scaled(inner, steps: int | None = None) -> None:
    """One rank's gradients are infinite in step 1; the step is left out everywhere."""
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=100)
    variables = _variables()
    moved = []
    for step in range(4):
        scaled = [g * outer.dynamic_scale if outer.built else g * 8.0 for g in _gradients(step)]
        if step == 1 and hvd.rank() == hvd.size() - 1:
            scaled[0] = scaled[0] * float("inf")
        before = _numbers(variables)
        outer.apply(scaled, variables)
        moved.append(not all(map(np.array_equal, before, _numbers(variables))))
        assert float(outer.dynamic_scale) == (8.0 if step < 1 else 4.0)
    # With two calls a step: 0 and 2 make one, 3 is the first of the next.
    assert moved == ([False, False, True, False] if steps else [True, False, True, True]), moved
    # What has been summed up of the next step is each rank's own.
    _same_everywhere(variables if steps else [*variables, *outer.variables])


def check_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    sgd = keras.optimizers.SGD
    _loss_scaled(hvd.DistributedOptimizer(sgd(0.1, momentum=0.9)))
    _loss_scaled(hvd.DistributedOptimizer(sgd(0.1, gradient_accumulation_steps=2)), 2)
    # An optimizer that is not distributed is as it was.
    alone = keras.optimizers.LossScaleOptimizer(sgd(0.1))
    assert _operations(lambda: alone.apply(_gradients(0), _variables())) == 0
    outer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(1.0), 4.0))
    variables, reference = _variables(), _variables()
    outer.apply([g * 4.0 for g in _gradients(0)], variables)
    sgd(1.0).apply(_gradients(0, -1), reference)
    _close(variables, reference)


def check_mixed_precision_trains_in_fit() -> None:
    model = _model(dtype="mixed_float16")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        policy = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        model = _model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        keras.mixed_precision.set_dtype_policy(policy)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = _data(hvd.rank())
    x = x.copy()
    if hvd.rank() == 0:
        x[9] = np.inf  # in the second of four batches
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    _same_everywhere([*model.weights, *model.optimizer.variables])
    assert all(np.isfinite(w).all() for w in _numbers(model.weights))
    assert int(model.optimizer.iterations) == 3


def check_fit_is_fit_with_the_joined_batch() -> None:
    rank, size, local = hvd.rank(), hvd.size(), 8
    model, reference = _model(), _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    reference.compile(keras.optimizers.Adam(0.01), "mse")
    parts = [_data(r) for r in range(size)]
    x, y = parts[rank]
    history = model.fit(
        x,
        y,
        batch_size=local,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    joined = [
        np.concatenate([part[k][i : i + local] for i in range(0, 32, local) for part in parts])
        for k in (0, 1)
    ]
    expected = reference.fit(*joined, batch_size=local * size, epochs=3, shuffle=False, verbose=0)
    _close(model.weights, reference.weights, 1e-4)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
    _same_everywhere([*model.weights, *model.optimizer.variables])


def check_ranks_that_start_differently_end_with_the_same_bits() -> None:
    model = _model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1)
    model.fit(*_data(hvd.rank()), batch_size=8, epochs=2, verbose=0, callbacks=[start])
    assert start.broadcast_done
    _same_everywhere([*model.weights, *model.optimizer.variables])


def check_local_variables_are_not_broadcast() -> None:
    model = _model(seed=hvd.rank())
    model.compile(keras.optimizers.SGD(0.0), "mse")
    local = model.layers[1].bias
    local.assign(np.full(3, float(hvd.rank()), "float32"))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    start.register_local_var(model.layers[0].kernel)
    kernel = _numbers([model.layers[0].kernel])[0]
    model.fit(*_data(0), batch_size=32, verbose=0, callbacks=[start])
    assert np.array_equal(_numbers([local])[0], np.full(3, hvd.rank()))
    assert np.array_equal(_numbers([model.layers[0].kernel])[0], kernel)
    _same_everywhere([model.layers[0].bias, model.layers[1].kernel])


def check_saved_models_go_on() -> None:
    x, y = _data(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = _model()
        optimizer = keras.optimizers.Adam(0.01, clipnorm=3.0)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        assert type(model.optimizer).__name__ == "Adam"
        assert type(model.optimizer).__module__ == type(optimizer).__module__
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is type(optimizer)
        assert plain.optimizer.clipnorm == 3.0
        again = hvd.load_model(path)
        assert isinstance(again.optimizer, type(optimizer))
        assert int(again.optimizer.iterations) == 4
        _close(again.optimizer.variables, model.optimizer.variables, 0)
        for one in (model, again):
            one.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        _same_everywhere(again.weights)
        assert all(map(np.array_equal, _numbers(again.weights), _numbers(model.weights)))


def check_custom_optimizers_are_loaded() -> None:
    class Mine(keras.optimizers.SGD):
        """A class of the script's own."""

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = _model()
        model.compile(Mine(0.1, momentum=0.5), "mse")
        model.fit(*_data(0), verbose=0)
        model.save(path)
        again = hvd.load_model(path, custom_optimizers=[Mine])
        assert isinstance(again.optimizer, Mine)
        again.fit(*_data(hvd.rank()), verbose=0)
        _same_everywhere(again.weights)


def check_an_optimizer_that_has_begun_goes_on() -> None:
    plain, reference = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
    variables, others = _variables(), _variables()
    for optimizer, mine in ((plain, variables), (reference, others)):
        optimizer.apply(_gradients(0, 0), mine)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.apply(_gradients(1), variables)
    reference.apply(_gradients(1, -1), others)
    _close(variables, others)
    assert int(optimizer.iterations) == 2


def check_arguments_that_do_not_fit() -> None:
    sgd = keras.optimizers.SGD
    make = hvd.DistributedOptimizer
    assert "Adasum" in _raised(ValueError, make, sgd(), op=hvd.Adasum)
    assert "Average" in _raised(ValueError, make, sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    assert "already" in _raised(ValueError, make, make(sgd()))
    assert "expected an optimizer" in _raised(ValueError, make, "sgd")
    assert "backward_passes" in _raised(ValueError, make, sgd(), backward_passes_per_step=0)
    assert "groups" in _raised(ValueError, make, sgd(), groups=-1)
    assert "built" in _raised(ValueError, make(sgd()).apply, [keras.ops.ones(2)])
    text = _raised(ValueError, hvd.allreduce, 1.0, average=True, op=hvd.Sum)
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
        in _raised(RuntimeError, hvd.broadcast_global_variables, 0)
        or keras.backend.backend() == "tensorflow"
    )


def check_reductions_begin_before_backward_ends() -> None:
    """The first layer's gradient waits, inside backward, for the reduction of the last one's."""
    if keras.backend.backend() != "torch":
        return
    import torch

    from perseus.torch.session import poll

    began: list[bool] = []

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            reducer = model.optimizer._reducer._reducer
            begun = reducer._overlap._begun.values() if reducer else ()
            handles = [each.reduction.handle for each in begun]
            while not all(map(poll, handles)):
                pass
            began.append(len(handles) == 2)
            return gradient

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            return Waits.apply(inputs)

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), Layer(), keras.layers.Dense(3)]
    )
    reference = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, y = _data(hvd.rank())
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert began == [False, True, True, True], began  # the first step makes the names
    parts = [_data(rank) for rank in range(hvd.size())]
    for first in range(0, 32, 8):
        rows = slice(first, first + 8)
        reference.train_on_batch(*(np.concatenate([p[k][rows] for p in parts]) for k in (0, 1)))
    _close(model.weights, reference.weights, 1e-4)
    # A backward of one's own, and gradients that are changed before they are applied.
    for announced, in_place in ((False, False), (True, False), (True, True)):
        for each, inputs in ((model, x), (reference, np.concatenate([p[0] for p in parts]))):
            each.zero_grad()
            loss = each(torch.as_tensor(inputs)).square().mean()
            (each.optimizer.scale_loss(loss) if announced else loss).backward()
            gradients = [v.value.grad for v in each.trainable_variables]
            if in_place:
                for gradient in gradients:
                    gradient.mul_(2.0)
            else:
                gradients = [gradient * 2.0 for gradient in gradients]
            each.optimizer.apply(gradients, each.trainable_variables)
    _close(model.weights, reference.weights, 1e-4)
    _same_everywhere([*model.weights, *model.optimizer.variables])
