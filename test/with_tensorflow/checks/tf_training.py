"""A small model and batches that differ per rank, for the checks that train; other settings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import perseus.tensorflow.horovod as hvd
from perseus import control

BATCH = 4  # rows per rank
COLUMNS = 5


def global_batch(step: int) -> np.ndarray:
    """What all ranks get together: (BATCH * size, COLUMNS), float32."""
    generator = np.random.default_rng(100 + step)
    return generator.normal(size=(BATCH * hvd.size(), COLUMNS)).astype(np.float32)


def share(batch: np.ndarray) -> np.ndarray:
    """This rank's rows."""
    return batch[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]


def initial_values() -> list[np.ndarray]:
    """Two matrices, a vector and a scalar, equal on all ranks."""
    generator = np.random.default_rng(7)
    return [
        (generator.normal(size=shape) * 0.3).astype(np.float32)
        for shape in ((COLUMNS, 6), (6,), (6, 1), ())
    ]


def variables() -> list[tf.Variable]:
    """The model's parameters, eager ones."""
    return [tf.Variable(value, name=f"v{i}") for i, value in enumerate(initial_values())]


def loss_of(parameters: list, batch) -> tf.Tensor:
    """A mean over the rows."""
    weight, bias, output, scalar = parameters
    hidden = tf.tanh(tf.matmul(batch, weight) + bias)
    return tf.reduce_mean((tf.matmul(hidden, output)[:, 0] * scalar - batch[:, 0]) ** 2)


def assert_equal_on_all_ranks(values: list) -> None:
    """The same bits everywhere."""
    for index, value in enumerate(values):
        array = np.ascontiguousarray(value)
        everybody = control.gather_bytes(array.tobytes(), f"equal.{index}", 0)
        assert all(row == everybody[0] for row in everybody), index


def raised(kind: type[BaseException], function: Callable[[], object]) -> str:
    """The message of the exception that `function` must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
