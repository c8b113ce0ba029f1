"""PERSEUS_PARAMETER_CHECK_N_STEPS for TensorFlow's variables, eagerly and in graphs. Stateless.

A graph calls Python once per step to count it, and passes the variables when they are to be
compared. XLA's programs cannot call Python, so they do not compare.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from perseus.gradients.parameter_check import SETTING, ParameterCheck
from perseus.tensorflow import xla
from perseus.tensorflow.modes import name_of, tf_variable, when


def compared(
    check: ParameterCheck, names: Sequence[str], sources: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    """Return the gradients, after comparing the variables among `sources` if that is due.

    names, sources, gradients: equally long; gradients are tensors, tf.IndexedSlices or None.

    Raises MismatchError, or UnknownError in a graph, on all ranks if variables differ.
    """
    gradients = list(gradients)
    if check.every == 0:
        return gradients
    if xla.within():
        warnings.warn(
            f"[tensorflow] {SETTING} has no effect in a function with jit_compile=True",
            stacklevel=3,
        )
        return gradients
    found = [
        (name_of(source) or name, tf_variable(source))
        for name, source in zip(names, sources, strict=True)
        if isinstance(tf_variable(source), tf.Variable)
    ]
    if tf.executing_eagerly():
        if check.due():
            check.compare(_buffers(found))
        return gradients

    def compare() -> Any:
        def call(*values: Any) -> None:
            check.compare(_buffers(zip([name for name, _ in found], values, strict=True)))

        return tf.py_function(call, [variable.read_value() for _, variable in found], [])

    due = tf.numpy_function(check.due, [], tf.bool)
    due.set_shape(())
    done = when(due, compare, lambda: None)
    with tf.control_dependencies([done]):
        return [_kept(gradient) for gradient in gradients]


def _kept(gradient: Any) -> Any:
    """Return a copy of a gradient that depends on the control dependencies of the context."""
    if gradient is None:
        return None
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _buffers(named: Any) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        array = np.ascontiguousarray(tf.convert_to_tensor(value))
        yield name, array.reshape(-1).view(np.uint8)
