"""Values that differ per rank and index, exact in every dtype; ways to run an op; asserts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from perseus import basics
from perseus.tensorflow import mpi_ops as hvd

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
REDUCED = [*FLOATS, *INTEGERS, tf.bool]
SHAPES = [(0,), (1,), (17,), (5, 7), (3, 0, 2), (1031,), ()]


def numbers(shape: tuple[int, ...], rank: int, salt: int = 0) -> Any:
    """Small whole numbers as float64: sums of two ranks' are exact in every dtype."""
    index = np.arange(int(np.prod(shape)))
    return ((index * 7 + rank * 5 + salt * 3 + index // 11) % 9).reshape(shape).astype(np.float64)


def mine(shape: tuple[int, ...], dtype: Any, salt: int = 0) -> Any:
    return tf.cast(numbers(shape, hvd.rank(), salt), dtype)


def everyone(shape: tuple[int, ...], salt: int = 0) -> Any:
    return np.stack([numbers(shape, rank, salt) for rank in range(hvd.size())])


def assert_equal(got: Any, expected: Any) -> None:
    """The same shape and, as float64, values."""
    values = tf.cast(got, tf.float64).numpy() if tf.is_tensor(got) else np.asarray(got)
    expected = np.asarray(expected)
    assert values.shape == expected.shape, (values.shape, expected.shape)
    np.testing.assert_array_equal(values.astype(np.float64), expected.astype(np.float64))


def in_function(function: Callable[[], Any]) -> Any:
    return tf.function(function)()


def in_session(function: Callable[[], Any]) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = session.run(function())
    return tf.nest.map_structure(tf.constant, values)


def eagerly(function: Callable[[], Any]) -> Any:
    return function()


WAYS = {"eager": eagerly, "function": in_function, "session": in_session}


def raised(kind: type[Exception], function: Callable[[], Any]) -> str:
    """The message of the error, which must be of this very class."""
    try:
        function()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@contextmanager
def another_world(**settings: str) -> Iterator[None]:
    """The next world, with these settings; afterwards one without them."""
    basics.shutdown()
    os.environ.update(settings)
    basics.init()
    try:
        yield
        # Nobody ends the world of those that are still at it.
        hvd._allreduce(tf.zeros([1]), "together")
    finally:
        basics.shutdown()
        for name in settings:
            del os.environ[name]
        basics.init()
