"""A small model and batches that differ per rank, for the checks that train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd
from perseus import control

BATCH = 4  # rows per rank
COLUMNS = 5
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def global_batch(step: int) -> np.ndarray:
    """What all ranks get together: (BATCH * size, COLUMNS), float32."""
    generator = np.random.default_rng(100 + step)
    return generator.normal(size=(BATCH * hvd.size(), COLUMNS)).astype(np.float32)


def share(batch: np.ndarray) -> np.ndarray:
    """This rank's rows."""
    return batch[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]


def model(seed: int = 7, dtype: str = "float32") -> gluon.nn.HybridSequential:
    """Two dense layers with weights that are equal on all ranks where the seed is."""
    generator = np.random.default_rng(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(6, activation="tanh", in_units=COLUMNS), gluon.nn.Dense(1, in_units=6))
    net.initialize()
    net.cast(dtype)
    for parameter in net.collect_params().values():
        values = generator.normal(size=parameter.shape) * 0.3
        parameter.set_data(mx.nd.array(values, dtype=dtype))
    return net


def backward(net: gluon.Block, batch: np.ndarray) -> None:
    """Gradients of a sum over the rows."""
    rows = mx.nd.array(batch)
    with autograd.record():
        losses = (net(rows)[:, 0] - rows[:, 0]) ** 2
    losses.backward()


def values_of(net: gluon.Block) -> list[np.ndarray]:
    """The parameters', in order."""
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def gradients_of(net: gluon.Block) -> list[np.ndarray]:
    """The parameters', in order."""
    return [parameter.grad().asnumpy() for parameter in net.collect_params().values()]


@functools.cache
def on_one_rank(steps: int) -> list[np.ndarray]:
    """The weights after steps on the global batch."""
    reference = model()
    trainer = gluon.Trainer(reference.collect_params(), "sgd", SGD, kvstore=None)
    for step in range(steps):
        batch = global_batch(step)
        backward(reference, batch)
        trainer.step(len(batch))
    return values_of(reference)


def assert_close(mine: Iterable[np.ndarray], right: Iterable[np.ndarray]) -> None:
    """But for rounding."""
    for one, other in zip(mine, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def assert_equal_on_all_ranks(values: Iterable[Any]) -> None:
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
