"""Small Keras models, data and gradients for the checks, and comparisons of their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import keras
import numpy as np

import perseus
import perseus.keras as hvd

SHAPES = [(4, 3), (3,), (2, 2, 2), ()]
IN_FUNCTIONS = (False, True) if keras.backend.backend() == "tensorflow" else (False,)


def message_of(kind: type[BaseException], function, *arguments, **options) -> str:
    """Call a function and return the message of the error that it raises."""
    try:
        function(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def within_function(step: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs as a graph; of IN_FUNCTIONS."""
    import tensorflow as tf

    return tf.function(step, autograph=False)


def make_variables(start: float = 1.0) -> list[keras.Variable]:
    return [keras.Variable(np.full(shape, start, "float32"), name="v") for shape in SHAPES]


def make_gradient(step: int, rank: int, index: int) -> np.ndarray:
    return np.random.default_rng([step, rank, index]).normal(size=SHAPES[index]).astype("float32")


def make_gradients(step: int, rank: int | None = None) -> list:
    """Return the gradients of a rank, by default this one; -1: their mean over all ranks."""
    ranks = range(hvd.size()) if rank == -1 else [hvd.rank() if rank is None else rank]
    return [
        keras.ops.convert_to_tensor(
            np.mean([make_gradient(step, r, i) for r in ranks], axis=0, dtype=np.float32)
        )
        for i in range(len(SHAPES))
    ]


def arrays_of(variables) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_close(actual, expected, tolerance: float = 1e-5) -> None:
    for mine, right in zip(arrays_of(actual), arrays_of(expected), strict=True):
        np.testing.assert_allclose(mine, right, rtol=tolerance, atol=tolerance)


def assert_same_everywhere(values) -> None:
    """Assert that values have the same bits on all ranks."""
    for index, mine in enumerate(arrays_of(values)):
        root = hvd.broadcast(mine.astype(mine.dtype, copy=True), 0, name=f"same.{index}")
        assert np.array_equal(mine, keras.ops.convert_to_numpy(root)), index


def count_operations(function) -> int:
    """Return how many operations the core has finished during function()."""
    before = perseus.stats()["operations"]
    function()
    return perseus.stats()["operations"] - before


def assert_like_plain(optimizer, plain, steps: int = 3, mine=make_gradients) -> None:
    """Compare steps on every rank's gradients with plain steps on the mean over ranks."""
    variables, reference = make_variables(), make_variables()
    for step in range(steps):
        optimizer.apply(mine(step), variables)
        plain.apply(make_gradients(step, -1), reference)
    assert_close(variables, reference)
    assert_same_everywhere([*variables, *optimizer.variables])


def make_model(seed: int = 0, **options):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, "tanh", **options), layers.Dense(3, **options)]
    )


def make_data(rank: int, count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(100 + rank)
    x = random.normal(size=(count, 6)).astype("float32")
    return x, np.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3] + x[:, 4]], axis=1)
