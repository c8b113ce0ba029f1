"""Variables that belong to one rank, in eager mode and in graphs. Stateless.

Variables in the docstrings is perseus.gradients.aggregation.Variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

_COLLECTION = "perseus_own_variables"  # those in a graph


def make(initial: Any, name: str) -> Any:
    """Create a local variable, which broadcasts of global variables do not change."""
    return tf.compat.v1.Variable(
        initial,
        trainable=False,
        use_resource=True,
        name=name,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, _COLLECTION],
    )


def clear_in(session: Any) -> None:
    """Set all own variables in the graph of a session to zeros."""
    for variable in session.graph.get_collection(_COLLECTION):
        zeros = np.zeros(variable.shape.as_list(), variable.dtype.as_numpy_dtype)
        variable.load(zeros, session)


def after(done: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return tf.control_dependencies() for `done`, without None, which eager operations return."""
    context: AbstractContextManager[Any] = tf.control_dependencies(
        [each for each in done if each is not None]
    )
    return context


class OwnVariables:
    """Implements Variables for TensorFlow."""

    def read(self, variable: Any) -> Any:
        """See Variables."""
        return variable.read_value()

    def kept(self, value: Any) -> Any:
        """See Variables. Tensors are immutable."""
        return value

    def assign(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        return variable.assign(value, read_value=False)

    def add(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        return variable.assign_add(value, read_value=False)

    def mean(self, variable: Any, total: Any, number: int) -> Any:
        """See Variables."""
        del variable
        return total / number

    def clear(self, variable: Any) -> Any:
        """See Variables."""
        return variable.assign(tf.zeros_like(variable), read_value=False)

    def clear_now(self, variable: Any) -> None:
        """See Variables, and clear_in() for those in graphs."""
        if not hasattr(variable, "graph"):
            with tf.init_scope():
                self.clear(variable)

    def is_zero(self, value: Any) -> Any:
        """See Variables."""
        return tf.equal(value, 0)

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """See Variables."""
        return after(done)

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """See Variables."""
        return tf.cond(condition, then, otherwise)
