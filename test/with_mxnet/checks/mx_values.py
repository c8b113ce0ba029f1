"""Values that differ per rank and index, exact in every dtype; asserts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

import perseus.mxnet as hvd

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
FLOATS = ["float16", "float32", "float64", BFLOAT16]
INTEGERS = ["uint8", "int8", "int32", "int64"]
ALL = [*FLOATS, *INTEGERS, "bool"]
SHAPES = [(1,), (17,), (5, 7), (3, 1, 2), (1031,)]


def numbers(shape: tuple[int, ...], rank: int, salt: int = 0) -> Any:
    """Small whole numbers as float64: sums of two ranks' are exact in every dtype."""
    index = np.arange(int(np.prod(shape)))
    return ((index * 7 + rank * 5 + salt * 3 + index // 11) % 9).reshape(shape).astype(np.float64)


def as_array(values: Any, dtype: Any = "float32") -> Any:
    """An mx.nd.NDArray; bool by way of numbers."""
    if dtype is BFLOAT16:
        # MXNet makes no such array of NumPy's numbers.
        return mx.nd.array(values, dtype="float32").astype(BFLOAT16)
    return mx.nd.array(np.asarray(values).astype(dtype), dtype=dtype)


def mine(shape: tuple[int, ...], dtype: Any = "float32", salt: int = 0) -> Any:
    return as_array(numbers(shape, hvd.rank(), salt), dtype)


def everyone(shape: tuple[int, ...], salt: int = 0) -> Any:
    return np.stack([numbers(shape, rank, salt) for rank in range(hvd.size())])


def assert_equal(got: Any, expected: Any) -> None:
    """The same shape and, as float64, values. Waits."""
    if isinstance(got, mx.nd.NDArray):
        if got.dtype == BFLOAT16:
            got = got.astype("float32")
        got = got.asnumpy()
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


def raised(kind: type[Exception], function: Callable[[], Any]) -> str:
    """The message of the error, which must be of this very class."""
    try:
        function()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def usable() -> None:
    """The next collective works and gives the right numbers."""
    assert_equal(hvd.allreduce(mine((3,)), op=hvd.Sum), everyone((3,)).sum(axis=0))
