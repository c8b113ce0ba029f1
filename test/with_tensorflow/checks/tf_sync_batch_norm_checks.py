"""SyncBatchNormalization on each rank's rows, against BatchNormalization on all of them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tf_training import assert_equal_on_all_ranks, raised

import perseus.tensorflow.horovod as hvd
from perseus.tensorflow.sync_batch_norm import joined_moments

keras = tf.keras
CHANNELS = 3
TAILS = {2: (), 3: (4,), 4: (2, 5), 5: (2, 1, 3)}


def _rows(kind: str) -> list[int]:
    n = hvd.size()
    return {
        "even": [4] * n,
        "uneven": [rank + 2 for rank in range(n)],
        "none": [3, 0, *[2] * (n - 2)],
    }[kind]


def _whole(rows: int, ndim: int, salt: int = 0) -> np.ndarray:
    """A batch whose channels, the last dimension, differ in mean and spread."""
    generator = np.random.default_rng(17 + salt)
    noise = generator.normal(size=(rows, *TAILS[ndim], CHANNELS))
    return noise * np.array([1.0, 5.0, 0.25]) + np.array([0.0, -7.0, 3.0])


def _mine(whole: np.ndarray, rows: list[int]) -> np.ndarray:
    first = sum(rows[: hvd.rank()])
    return whole[first : first + rows[hvd.rank()]]


def _step(layer, batch, weights, mask=None):
    """(output, gradients of the input and the parameters) of a weighted sum of the outputs."""
    inputs = tf.convert_to_tensor(batch)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = layer(inputs, training=True, mask=mask)
        loss = tf.reduce_sum(output * tf.cast(weights, output.dtype))
    sources = [inputs, *layer.trainable_variables]
    return output, tape.gradient(loss, sources)


def _compare(kind: str, ndim: int, dtype: str, compiled: bool, tolerance: float, **options) -> None:
    rows = _rows(kind)
    whole = _whole(sum(rows), ndim)
    weights = _whole(sum(rows), ndim, salt=1)
    layers = [
        hvd.SyncBatchNormalization(dtype=dtype, **options),
        keras.layers.BatchNormalization(dtype="float64", **options),
    ]
    for layer in layers:
        layer.build((None, *whole.shape[1:]))
        for index, variable in enumerate(layer.trainable_variables):
            variable.assign(np.array([1.5, -0.5, 2.0]) + index)
    step = tf.function(_step, reduce_retracing=True) if compiled else _step
    mask = masked = None
    if options.get("name") == "masked":
        mask = np.random.default_rng(3).integers(0, 2, whole.shape[:-1]).astype(bool)
        masked = tf.constant(_mine(mask, rows))
    for _ in range(2):
        output, mine = step(
            layers[0], _mine(whole, rows).astype(dtype), _mine(weights, rows), masked
        )
        expected, reference = _step(
            layers[1], whole, weights, None if mask is None else tf.constant(mask)
        )
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(output, _mine(expected.numpy(), rows), **close)
    np.testing.assert_allclose(mine[0], _mine(reference[0].numpy(), rows), **close)
    for share, total in zip(mine[1:], reference[1:], strict=True):
        summed = hvd.allreduce(tf.cast(share, tf.float64), op=hvd.Sum, name="share")
        np.testing.assert_allclose(summed, total, rtol=tolerance, atol=tolerance * 10)
    for left, right in zip(
        layers[0].non_trainable_variables, layers[1].non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(left.numpy(), right.numpy(), **close)
    assert_equal_on_all_ranks([v.numpy() for v in layers[0].non_trainable_variables])


def check_equals_plain_normalisation_of_the_joined_batch() -> None:
    for kind in ("even", "uneven", "none"):
        for ndim in (2, 4):
            _compare(kind, ndim, "float64", False, 1e-9)
    _compare("uneven", 5, "float64", False, 1e-9, center=False)
    _compare("uneven", 3, "float64", True, 1e-9, scale=False)
    _compare("even", 4, "float32", True, 1e-3)


def check_masked_values_do_not_count() -> None:
    _compare("uneven", 3, "float64", False, 1e-6, name="masked")


def check_masked_values_may_be_infinite() -> None:
    shape = (hvd.rank() + 2, 4, CHANNELS)
    mask = np.random.default_rng(hvd.rank()).integers(0, 2, shape[:-1])
    mask[0, 0] = 0
    clean = _whole(shape[0], 3, salt=hvd.rank()).astype(np.float32)
    spoilt = np.where(mask[..., None] == 0, np.float32([np.nan, np.inf, -np.inf]), clean)
    found = []
    for batch in (clean, spoilt):
        inputs = tf.convert_to_tensor(batch)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            mean, variance = joined_moments(inputs, [0, 1], tf.constant(mask))
            loss = tf.reduce_sum(mean * [1.0, 2.0, 3.0] + variance * [4.0, 5.0, 6.0])
        found.append([mean, variance, tape.gradient(loss, inputs)])
    for values in found[1]:
        assert np.isfinite(values).all()
    for values, expected in zip(*reversed(found), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert not found[1][2][0, 0].numpy().any()


def check_inference_is_local() -> None:
    layer = hvd.SyncBatchNormalization()
    plain = keras.layers.BatchNormalization()
    batch = _whole(2, 2).astype(np.float32)
    np.testing.assert_array_equal(plain(batch, training=False), layer(batch, training=False))


def check_arguments_and_configuration() -> None:
    for fused in (True, None):
        assert "fused" in raised(ValueError, lambda f=fused: hvd.SyncBatchNormalization(fused=f))
    layer = hvd.SyncBatchNormalization(momentum=0.75, name="mine")
    assert hvd.SyncBatchNormalization().name.startswith("sync_batch_normalization")
    assert isinstance(layer, keras.layers.BatchNormalization)
    # Saved models name it so.
    registered = keras.utils.get_registered_object("perseus>SyncBatchNormalization")
    assert registered is hvd.SyncBatchNormalization
    again = registered.from_config(layer.get_config())
    assert (again.momentum, again.name) == (0.75, "mine")
