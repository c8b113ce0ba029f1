"""Training, saving and loading models of Keras 3 with DistributedOptimizer."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import gradient_settings as settings
import keras
import numpy as np
import pytest
from keras_training import (
    arrays_of,
    assert_close,
    assert_same_everywhere,
    make_data,
    make_model,
    message_of,
)
from worlds import world_with

import perseus.keras as hvd
from perseus.errors import HorovodInternalError


def check_mixed_precision_trains_in_fit() -> None:
    model = make_model(dtype="mixed_float16")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        policy = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        keras.mixed_precision.set_dtype_policy(policy)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = make_data(hvd.rank())
    x = x.copy()
    if hvd.rank() == 0:
        x[9] = np.inf  # in the second of four batches
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert_same_everywhere([*model.weights, *model.optimizer.variables])
    assert all(np.isfinite(w).all() for w in arrays_of(model.weights))
    assert int(model.optimizer.iterations) == 3


def check_scaled_losses_around_a_multi_optimizer_of_distributed_ones() -> None:
    rank, mean = hvd.rank(), (hvd.size() + 1) / 2
    weight = keras.Variable([1.0])
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner))
    optimizer = keras.optimizers.LossScaleOptimizer(multi, initial_scale=2.0)
    optimizer.build([weight])
    spoilt = keras.ops.convert_to_tensor([np.float32("inf") if rank == 0 else 1.0])
    assert not optimizer.check_finite([spoilt])
    optimizer.apply([spoilt], [weight])
    optimizer.apply([keras.ops.convert_to_tensor([rank + 1.0])], [weight])
    assert arrays_of([weight, optimizer.dynamic_scale]) == [1.0 - mean, 1.0]
    assert "already" in message_of(ValueError, hvd.DistributedOptimizer, optimizer)


def check_fit_is_fit_with_the_joined_batch() -> None:
    rank, size, local = hvd.rank(), hvd.size(), 8
    model, reference = make_model(), make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    reference.compile(keras.optimizers.Adam(0.01), "mse")
    parts = [make_data(r) for r in range(size)]
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
    assert_close(model.weights, reference.weights, 1e-4)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
    assert_same_everywhere([*model.weights, *model.optimizer.variables])


def check_ranks_that_start_differently_end_with_the_same_bits() -> None:
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1)
    model.fit(*make_data(hvd.rank()), batch_size=8, epochs=2, verbose=0, callbacks=[start])
    assert start.broadcast_done
    assert_same_everywhere([*model.weights, *model.optimizer.variables])


def check_local_variables_are_not_broadcast() -> None:
    model = make_model(seed=hvd.rank())
    model.compile(keras.optimizers.SGD(0.0), "mse")
    local = model.layers[1].bias
    local.assign(np.full(3, float(hvd.rank()), "float32"))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    start.register_local_var(model.layers[0].kernel)
    kernel = arrays_of([model.layers[0].kernel])[0]
    model.fit(*make_data(0), batch_size=32, verbose=0, callbacks=[start])
    assert np.array_equal(arrays_of([local])[0], np.full(3, hvd.rank()))
    assert np.array_equal(arrays_of([model.layers[0].kernel])[0], kernel)
    assert_same_everywhere([model.layers[0].bias, model.layers[1].kernel])


def check_loaded_models_do_not_keep_the_choice_of_xla() -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras chooses XLA on TensorFlow only")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = make_model()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)  # as if on a GPU
        model.save(path)
        assert keras.models.load_model(path).jit_compile
        again = hvd.load_model(path)
        assert not again.jit_compile
        again.fit(*make_data(hvd.rank()), batch_size=8, verbose=0)
        assert_same_everywhere(again.weights)


def check_saved_models_go_on() -> None:
    x, y = make_data(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = make_model()
        optimizer = keras.optimizers.Adam(0.01, clipnorm=3.0)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        assert type(model.optimizer).__name__ == "Adam"
        assert type(model.optimizer).__module__ == type(optimizer).__module__
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is type(optimizer)
        assert plain.optimizer.clipnorm == 3.0
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # as a file does
            assert type(copied.optimizer) is type(optimizer)
        again = hvd.load_model(path)
        assert isinstance(again.optimizer, type(optimizer))
        assert int(again.optimizer.iterations) == 4
        assert_close(again.optimizer.variables, model.optimizer.variables, 0)
        for one in (model, again):
            one.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        assert_same_everywhere(again.weights)
        assert all(map(np.array_equal, arrays_of(again.weights), arrays_of(model.weights)))


def check_custom_optimizers_are_loaded() -> None:
    class Mine(keras.optimizers.SGD):
        """A class of the script's own."""

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = make_model()
        model.compile(Mine(0.1, momentum=0.5), "mse")
        model.fit(*make_data(0), verbose=0)
        model.save(path)
        again = hvd.load_model(path, custom_optimizers=[Mine])
        assert isinstance(again.optimizer, Mine)
        again.fit(*make_data(hvd.rank()), verbose=0)
        assert_same_everywhere(again.weights)


@keras.saving.register_keras_serializable("checks", "Other")
class Registered(keras.optimizers.SGD):
    """A class that Keras finds by the name under which the script has registered it."""


def check_registered_optimizers_are_saved_under_their_names() -> None:
    x, y = make_data(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        saved, best = (Path(folder) / f"{name}.keras" for name in ("saved", "best"))
        model = make_model()
        model.compile(hvd.DistributedOptimizer(Registered(0.1, momentum=0.5)), "mse")
        keep = keras.callbacks.ModelCheckpoint(best)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[keep])
        model.save(saved)
        for path in (saved, best):
            assert type(keras.models.load_model(path).optimizer) is Registered
            again = hvd.load_model(path)
            assert isinstance(again.optimizer, Registered)
            assert_close(again.optimizer.variables, model.optimizer.variables, 0)
            again.fit(x, y, batch_size=8, verbose=0)
            assert_same_everywhere(again.weights)
        scaled = keras.optimizers.LossScaleOptimizer(model.optimizer)
        inner = keras.optimizers.deserialize(keras.optimizers.serialize(scaled)).inner_optimizer
        assert type(inner) is Registered
    assert keras.saving.get_registered_object("checks>Other") is Registered


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
    reference = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, y = make_data(hvd.rank())
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert began == [False, True, True, True], began  # the first step makes the names
    parts = [make_data(rank) for rank in range(hvd.size())]
    for first in range(0, 32, 8):
        rows = slice(first, first + 8)
        reference.train_on_batch(*(np.concatenate([p[k][rows] for p in parts]) for k in (0, 1)))
    assert_close(model.weights, reference.weights, 1e-4)
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
    assert_close(model.weights, reference.weights, 1e-4)
    assert_same_everywhere([*model.weights, *model.optimizer.variables])


def check_compiled_steps_leave_reductions_as_they_are() -> None:
    if keras.backend.backend() != "torch":
        pytest.skip("on TensorFlow, XLA compiles; see tf_xla_library_checks")
    import torch

    class Texts(logging.Handler):
        def __init__(self) -> None:
            super().__init__(logging.WARNING)
            self.seen: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.seen.append(record.getMessage())

    texts, results = Texts(), []
    x, y = make_data(hvd.rank())
    # The graphs are those that torch's default would compile, which takes minutes.
    quick = mock.patch("torch.compile", partial(torch.compile, backend="eager"))
    logging.getLogger("torch._dynamo").addHandler(texts)
    try:
        for compiles in (False, True):
            keras.utils.set_random_seed(1)
            model = make_model()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
            model.compile(optimizer, "mse", jit_compile=compiles)
            with quick:
                model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            assert_same_everywhere([*model.weights, *model.optimizer.variables])
            results.append(model.weights)
    finally:
        logging.getLogger("torch._dynamo").removeHandler(texts)
    assert_close(*results)
    assert not texts.seen, texts.seen


def check_gradients_that_are_changed_are_counted_once() -> None:
    """What the core sums or holds back has the changed ones alone; the last step sends the rest."""
    if keras.backend.backend() != "torch":
        pytest.skip("only on PyTorch do reductions begin before the optimizer has the gradients")
    import torch

    slopes = [settings.normal(hvd.rank(), step)[0] for step in range(4)]
    for world in ({"PERSEUS_ACCUMULATE_N_STEPS": 2}, {"PERSEUS_ALLREDUCE_CODEC": "int8"}):
        with settings.apart(PERSEUS_ALLREDUCE_DTYPE=1, **world):
            variable = keras.Variable(np.zeros(slopes[0].shape, "float32"), name="v")
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
            for slope in slopes:
                variable.value.grad = None
                loss = (variable.value * torch.from_numpy(slope)).sum()
                optimizer.scale_loss(loss).backward()
                variable.value.grad.mul_(0.5)  # as clipping does
                optimizer.apply([variable.value.grad], [variable])
            if "PERSEUS_ALLREDUCE_CODEC" in world:
                hvd.flush_residuals()
                optimizer.apply([torch.zeros_like(variable.value)], [variable])
            every = [settings.normal(r, step)[0] for r in range(hvd.size()) for step in range(4)]
            np.testing.assert_allclose(
                arrays_of([variable])[0], -0.5 * sum(every), rtol=1e-3, atol=1e-3
            )


def check_a_gradient_that_only_one_rank_changes_is_named() -> None:
    """It does not become a part of the others' next step."""
    if keras.backend.backend() != "torch":
        pytest.skip("only on PyTorch do reductions begin before the optimizer has the gradients")
    import torch

    with world_with(HOROVOD_STALL_CHECK_TIME_SECONDS=1):
        variable = keras.Variable(np.zeros(4, "float32"), name="scrubbed")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)

        def step(changes: bool) -> None:
            variable.value.grad = None
            slope = torch.arange(4.0) + hvd.rank()
            optimizer.scale_loss((variable.value * slope).sum()).backward()
            if changes:
                variable.value.grad.mul_(2.0)
            optimizer.apply([variable.value.grad], [variable])

        def steps() -> None:
            step(changes=False)
            step(changes=hvd.rank() == 0)
            step(changes=False)

        text = message_of(HorovodInternalError, steps)
        assert "Deadlock" in text and "scrubbed/changed" in text, text


def check_gradients_that_share_their_memory() -> None:
    """Autograd gives two variables one gradient, or one that it still needs."""
    if keras.backend.backend() != "torch":
        return
    import torch

    variables = [keras.Variable(np.zeros(4, "float32"), name=f"v{index}") for index in range(2)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=hvd.Compression.none
    )
    own = torch.arange(4.0) * (hvd.rank() + 1)
    shared = own.clone()
    optimizer.apply([shared, shared.view(4)], variables)
    assert torch.equal(shared, own)
    mean = np.arange(4, dtype="float32") * (hvd.size() + 1) / 2
    for variable in variables:
        assert np.array_equal(keras.ops.convert_to_numpy(variable), -mean)
