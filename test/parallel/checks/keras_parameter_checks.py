"""What a Keras model without an equal start, or without a distributed optimizer, makes fit say."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import numpy as np
from worlds import world_with

import perseus.keras as hvd
from perseus.keras.library import keras


def _model(seed: int, wrap: bool) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, name="first"),
            keras.layers.Dense(2, name="second"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer) if wrap else optimizer, "mse")
    return model


def _fit(model: keras.Model, *callbacks: keras.callbacks.Callback) -> None:
    generator = np.random.default_rng(hvd.rank())
    images, labels = generator.random((24, 4)), generator.random((24, 2))
    model.fit(images, labels, batch_size=4, verbose=0, callbacks=list(callbacks))


def _message(function: Callable[[], None]) -> str:
    """Of the error that `function` must raise: TensorFlow's own, or MismatchError."""
    try:
        function()
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


def _warnings_of(function: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(entry.message) for entry in caught if "not a DistributedOpt" in str(entry.message)]


def _start() -> keras.callbacks.Callback:
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def check_a_start_that_nobody_broadcast_is_found() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
        message = _message(lambda: _fit(_model(hvd.rank(), wrap=True)))
        assert "after 2 steps the parameter" in message, message
        assert "first/kernel is not the same on all ranks (hash " in message, message


def check_an_equal_start_passes() -> None:
    for steps in (1, 2):
        with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=steps):
            _fit(_model(hvd.rank(), wrap=True), _start())


def check_the_callback_compares_where_the_optimizer_does_not() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=3):
        message = _message(lambda: _fit(_model(1, wrap=False), _start()))
        assert "after 3 steps the parameter first/kernel is not the same" in message, message


def check_an_optimizer_that_nobody_wrapped_is_warned_of() -> None:
    found = _warnings_of(lambda: _fit(_model(1, wrap=False), _start()))
    assert len(found) == (hvd.rank() == 0), found
    assert all("hvd.load_model instead of keras.models.load_model" in text for text in found)


def check_a_wrapped_optimizer_is_not_warned_of() -> None:
    assert not _warnings_of(lambda: _fit(_model(1, wrap=True), _start()))


def check_a_model_that_keras_loaded_is_warned_of() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        _model(1, wrap=True).save(path)
        for load, warned in ((keras.models.load_model, hvd.rank() == 0), (hvd.load_model, False)):
            model = load(path)
            found = _warnings_of(lambda m=model: _fit(m, _start()))
            assert len(found) == warned, (load, found)
