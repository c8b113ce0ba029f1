"""Losses scaled by hand around a DistributedGradientTape: gradients travel scaled."""

from __future__ import annotations

import gradient_settings as settings
import numpy as np
import tensorflow as tf

import perseus.tensorflow.horovod as hvd
from perseus.gradients import scopes
from perseus.keras.library import KERAS_2, keras

STEPS = 6
UNSCALED = (hvd.Compression.none, hvd.Compression.settings, hvd.Compression.bf16)


class _Training:
    """Six steps by losses whose gradients are given, and one that rank 1 spoils.

    scaling: arguments of LossScaleOptimizer; None = no scaling, and nothing spoilt.
    """

    def __init__(self, compression, scaling: dict | None, spoils: bool = True) -> None:
        self.variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
        self.scales: list[float] = []
        self._compression = compression
        scopes._taken.clear()  # the same names: the same rank owns a result
        self._residuals = hvd.GradientResiduals("scaled")
        self._optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        if KERAS_2:
            kind = keras.mixed_precision.LossScaleOptimizer
        else:
            kind = keras.optimizers.LossScaleOptimizer
        self._scaler = None if scaling is None else kind(self._optimizer, **scaling)
        step = tf.function(self._step)
        for number in range(STEPS):
            slopes = settings.normal(hvd.rank(), number)
            if number == 3 and spoils and self._scaler is not None:
                self._without(step, slopes)
            step(*map(tf.constant, slopes))
            self._remember()

    def _without(self, step, slopes) -> None:
        """A step that all ranks leave out, since rank 1's gradients are not finite."""
        before, spoilt = self.bits(), [slope.copy() for slope in slopes]
        if hvd.rank() == 1:
            spoilt[0][0, 0] = np.inf
        step(*map(tf.constant, spoilt))
        assert self.bits() == before
        self._remember()

    def _remember(self) -> None:
        if self._scaler is not None:
            self.scales.append(
                float(self._scaler.loss_scale if KERAS_2 else self._scaler.dynamic_scale)
            )

    def _step(self, *slopes) -> None:
        with tf.GradientTape() as tape:
            products = zip(slopes, self.variables, strict=True)
            loss = tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])
            if self._scaler is not None:
                scale = "get_scaled_loss" if KERAS_2 else "scale_loss"
                loss = getattr(self._scaler, scale)(loss)
        tape = hvd.DistributedGradientTape(
            tape, compression=self._compression, residuals=self._residuals
        )
        gradients = tape.gradient(loss, self.variables)
        if self._scaler is not None and KERAS_2:  # Keras 3 does it where it applies them
            gradients = self._scaler.get_unscaled_gradients(gradients)
        (self._scaler or self._optimizer).apply_gradients(
            zip(gradients, self.variables, strict=True)
        )

    def held(self) -> list[np.ndarray]:
        found = self._residuals.residuals().values()
        return [np.frombuffer(data, np.float32) for _, data in found]

    def bits(self) -> list[bytes]:
        return [variable.numpy().tobytes() for variable in self.variables]


def check_values_are_those_without_a_scale() -> None:
    """Bit for bit, as scales are powers of two, while the scale goes up and down."""
    growth = "dynamic_growth_steps"
    with settings.apart():
        for compression in UNSCALED:
            plain = _Training(compression, None)
            scaled = _Training(compression, {"initial_scale": 2.0**10, growth: 2})
            assert scaled.bits() == plain.bits(), compression
            settings.assert_same_everywhere([v.numpy() for v in scaled.variables])
            low, high = 2.0**10, 2.0**11
            assert scaled.scales == [low, high, high, low, low, high, high], scaled.scales


def check_float16_does_not_overflow() -> None:
    """Scaled gradients are far beyond float16, whose chunks have scales of their own."""
    with settings.apart(PERSEUS_ALLREDUCE_DTYPE=2):
        plain = _Training(hvd.Compression.settings, None)
        scaled = _Training(
            hvd.Compression.settings, {"initial_scale": 2.0**30, "dynamic_growth_steps": 1000}
        )
        assert scaled.bits() == plain.bits()
        assert scaled.scales == [2.0**30] * 3 + [2.0**29] * 4


def check_what_is_held_has_the_scale_of_its_step() -> None:
    """With one scale for all steps that is as without."""
    with settings.apart():
        plain = _Training(hvd.Compression.int8, None)
        scaling = {"initial_scale": 2.0**10, "dynamic_growth_steps": 1000}
        scaled = _Training(hvd.Compression.int8, scaling, spoils=False)
        assert scaled.bits() == plain.bits()
        assert scaled.scales == [2.0**10] * STEPS
        held, expected = scaled.held(), plain.held()
        assert len(held) == len(settings.SHAPES) and any(numbers.any() for numbers in held)
        for mine, right in zip(held, expected, strict=True):
            np.testing.assert_array_equal(mine, right * np.float32(2.0**10))
