"""Compression.rotate for TensorFlow's variables, eagerly and in functions.

A function calls Python once per step, which gets the rows that are sent next and returns what the
rows that were sent last are corrected by. TensorFlow itself reads and changes the variables, in
the order of the program. XLA's programs cannot call Python, and graphs of TensorFlow 1 have no such
order: both are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from perseus.gradients.array_rotation import ArrayRotation, Rows, cut
from perseus.gradients.rotation import synchronize_parameters
from perseus.gradients.turns import rows_of
from perseus.process_sets import ProcessSet
from perseus.tensorflow import xla
from perseus.tensorflow.modes import when

__all__ = ["VariableRotation", "check_possible", "rotated", "synchronize_parameters"]

_NONE = -1  # no part was sent before


class VariableRotation(ArrayRotation):
    """variables: those that are trained, in the same order on all ranks."""

    def __init__(
        self, variables: Sequence[Any], name: str, process_set: ProcessSet, parts: int
    ) -> None:
        self._variables = list(variables)
        super().__init__(f"rotate.{name}", process_set, parts)

    def rows(self, part: int) -> Rows:
        """See ArrayRotation."""
        return [np.asarray(tf.cast(self._rows(v, part), tf.float32)) for v in self._variables]

    def add(self, part: int, differences: Rows) -> None:
        """See ArrayRotation."""
        for variable, difference in zip(self._variables, differences, strict=True):
            self._add(variable, part, difference)

    def put(self, part: int, values: Rows) -> None:
        """See ArrayRotation."""
        for variable, rows in zip(self._variables, values, strict=True):
            if rows.size == 0:
                continue
            begin, end = self._bounds(variable, part)
            value = tf.cast(rows, variable.dtype)
            if variable.shape.rank == 0:
                variable.assign(tf.reshape(value, []))
            else:
                variable[begin:end].assign(value)

    def step(self) -> Any:
        """Correct the rows that were sent last, and send the next ones; return what has done it."""
        part = tf.numpy_function(self._next_part, [], tf.int64)
        part.set_shape(())
        rows = [tf.cast(self._rows(v, part), tf.float32) for v in self._variables]
        before, *differences = tf.numpy_function(
            self._exchange, [part, *rows], [tf.int64] + [tf.float32] * len(rows)
        )
        before.set_shape(())
        return tf.group(
            *(
                self._add(variable, before, difference)
                for variable, difference in zip(self._variables, differences, strict=True)
            )
        )

    def _next_part(self) -> Any:
        part = np.int64(self._turn)
        self._turn = (self._turn + 1) % self.parts
        return part

    def _exchange(self, part: Any, *rows: Any) -> list[Any]:
        sent = self.send_rows(int(part), list(rows))
        pending, self._pending = self._pending, sent
        if pending is None:
            before, differences = _NONE, [np.zeros((0, *a.shape[1:]), np.float32) for a in rows]
        else:
            counts = [self._bounds(variable, pending.part) for variable in self._variables]
            shapes = [
                (end - begin, *a.shape[1:]) for (begin, end), a in zip(counts, rows, strict=True)
            ]
            before, differences = pending.part, cut(self.difference(pending), shapes)
        return [np.int64(before), *differences]

    def _bounds(self, variable: Any, part: Any) -> tuple[Any, Any]:
        count = 1 if variable.shape.rank == 0 else variable.shape[0]
        rows = rows_of(count, part, self.parts)
        return rows.start, rows.stop

    def _rows(self, variable: Any, part: Any) -> Any:
        begin, end = self._bounds(variable, part)
        value = variable.read_value()
        return (tf.reshape(value, [1]) if variable.shape.rank == 0 else value)[begin:end]

    def _add(self, variable: Any, part: Any, difference: Any) -> Any:
        difference = tf.cast(difference, variable.dtype)
        if variable.shape.rank == 0:
            return variable.assign_add(tf.reduce_sum(difference), read_value=False)
        begin, _ = self._bounds(variable, part)
        difference = tf.reshape(difference, [-1, *variable.shape[1:]])
        indices = tf.cast(begin, tf.int64) + tf.range(tf.shape(difference, tf.int64)[0])
        return variable.scatter_add(tf.IndexedSlices(difference, indices))


def check_possible() -> None:
    """Raise NotImplementedError in functions that XLA compiles and in graphs of TensorFlow 1."""
    if xla.within() or not tf.compat.v1.executing_eagerly_outside_functions():
        where = "with jit_compile=True" if xla.within() else "of TensorFlow 1"
        raise NotImplementedError(
            f"[tensorflow] Compression.rotate and PERSEUS_DOWNSAMPLE_N_ELEMENTS change variables "
            f"between hosts, which a graph {where} cannot do: use an eager loop or tf.function "
            f"(Keras: jit_compile=False), or another compression"
        )


def rotated(rotation: VariableRotation, gradients: Sequence[Any], applies: Any) -> list[Any]:
    """Return the gradients, which wait until the variables have been rotated.

    gradients: tensors, tf.IndexedSlices or None. applies: whether they will be applied; None means
    that they will.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    with tf.control_dependencies(tf.nest.flatten(found, expand_composites=True)):
        done = when(tf.constant(True) if applies is None else applies, rotation.step, lambda: None)
    with tf.control_dependencies([] if done is None else [done]):
        return [
            None
            if gradient is None
            else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            for gradient in gradients
        ]
