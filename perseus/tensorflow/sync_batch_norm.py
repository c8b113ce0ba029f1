"""Batch normalisation over the batches of all ranks, as a Keras layer.

Source of the interface: Horovod 0.28.1, horovod.tensorflow.sync_batch_norm; unlike there, a rank's
weight is its number of values, so batches of different sizes also form the joined batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from perseus import basics, config
from perseus.tensorflow import ops
from perseus.tensorflow.ops import Sum

_KERAS_2 = hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var")
# Not the layer's name, which counts earlier layers of this rank, but its position in the graph.
_SCOPE = "SyncBatchNormalization/"


@tf.keras.utils.register_keras_serializable(package="perseus")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation whose statistics, while training, are those of all ranks together.

    fused: False; anything else is a ValueError, as there is no fused form.
    kwargs: as for keras.layers.BatchNormalization; equal on all ranks.

    Inputs of any floating dtype; all sizes but the number of channels may differ between ranks, and
    a batch may be empty. In inference, and on one rank, it is the plain layer and does not
    communicate. The gradient of the inputs is that of the sum of all ranks' losses; gamma and beta
    get this rank's share of it. DistributedOptimizer and the tape average both.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if _KERAS_2:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Keras 3 calls this for mean and variance: (inputs, mask).
        if _KERAS_2 or _alone():
            return super()._moments(inputs, *args, **kwargs)
        return joined_moments(inputs, self._reduction_axes, *args, **kwargs)

    def _calculate_mean_and_var(
        self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
    ) -> Any:
        # Keras 2 calls this.
        if _alone():
            return super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask=mask)
        moments = joined_moments(inputs, list(reduction_axes), mask)
        if not keep_dims:
            return moments
        shape = _kept_shape(inputs, list(reduction_axes))
        return tuple(tf.reshape(moment, shape) for moment in moments)


def _alone() -> bool:
    return basics.size() == 1 and not config.elastic()


def joined_moments(inputs: Any, axes: list[int], mask: Any = None) -> tuple[Any, Any]:
    """Mean and variance of all ranks' inputs over `axes`, one number per channel each.

    mask: has the inputs' shape without the last dimension, which must be the channels; values where
        it is false do not count, even if they are not finite.
    """
    counted = None if mask is None else tf.cast(tf.expand_dims(mask, -1), tf.bool)
    shape = _kept_shape(inputs, axes)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def moments(values: Any) -> tuple[Any, Any]:
        if counted is not None:  # a product with a weight of 0 would keep NaN and infinities
            values = tf.where(counted, values, tf.zeros_like(values))
        count, mean, squares = _own_statistics(values, axes, counted)
        row = tf.concat([tf.cast(part, tf.float64) for part in (mean, squares, count)], 0)
        with tf.name_scope(_SCOPE):
            (rows,) = ops.allgather([row[None]])
        channels = tf.shape(mean)[0]
        means, deviations = rows[:, :channels], rows[:, channels : 2 * channels]
        counts = rows[:, 2 * channels :]
        total = tf.reduce_sum(counts)
        joined = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
        spread = tf.reduce_sum(deviations + counts * (means - joined) ** 2, 0)
        variance = tf.cast(tf.math.divide_no_nan(spread, total), values.dtype)
        joined = tf.cast(joined, values.dtype)

        def gradient(of_mean: Any, of_variance: Any) -> Any:
            with tf.name_scope(_SCOPE):
                own = tf.cast(tf.concat([of_mean, of_variance], 0), tf.float64)
                (sums,), _ = ops.allreduce([own], op=Sum)
            shares = tf.cast(tf.math.divide_no_nan(sums, total), values.dtype)
            by_mean = tf.reshape(shares[:channels], shape)
            by_variance = tf.reshape(shares[channels:], shape)
            result = by_mean + 2.0 * by_variance * (values - tf.reshape(joined, shape))
            return result if counted is None else tf.where(counted, result, tf.zeros_like(result))

        return (joined, variance), gradient

    mean, variance = moments(inputs)
    return mean, variance


def _own_statistics(values: Any, axes: list[int], counted: Any) -> tuple[Any, Any, Any]:
    """([values per channel], their mean and sum of squared deviations per channel).

    counted: where values count; the others are 0. None: everywhere.
    """
    total = tf.reduce_sum(values, axes, keepdims=True)
    if counted is None:
        extents = tf.gather(tf.shape(values, tf.int64), axes)
        count = tf.cast(tf.reduce_prod(extents), tf.float64)
    else:
        count = tf.reduce_sum(tf.cast(counted, tf.float64))
    mean = tf.math.divide_no_nan(total, tf.cast(count, values.dtype))
    squares = tf.math.squared_difference(values, mean)
    if counted is not None:
        squares = tf.where(counted, squares, tf.zeros_like(squares))
    return count[None], tf.reshape(mean, [-1]), tf.reduce_sum(squares, axes)


def _kept_shape(inputs: Any, axes: list[int]) -> Any:
    """The shape of the inputs with 1 for the dimensions that are reduced."""
    extents = tf.shape(inputs)
    ones = [axis % len(inputs.shape) for axis in axes]
    return tf.stack([1 if axis in ones else extents[axis] for axis in range(len(inputs.shape))])
