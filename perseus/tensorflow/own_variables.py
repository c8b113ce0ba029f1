"""Variables of a rank's own, in eager mode and in graphs. Stateless; see Variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf


def make(initial: Any, name: str) -> Any:
    """One that broadcasts of global variables leave alone."""
    return tf.compat.v1.Variable(
        initial,
        trainable=False,
        use_resource=True,
        name=name,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )


def after(done: Sequence[Any]) -> AbstractContextManager[Any]:
    """tf.control_dependencies of what is not None, which eager mode may give for an operation."""
    context: AbstractContextManager[Any] = tf.control_dependencies(
        [each for each in done if each is not None]
    )
    return context


class OwnVariables:
    """See Variables."""

    def read(self, variable: Any) -> Any:
        """See Variables."""
        return variable.read_value()

    def kept(self, value: Any) -> Any:
        """See Variables. Tensors do not change."""
        return value

    def assign(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        return variable.assign(value, read_value=False)

    def add(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        return variable.assign_add(value, read_value=False)

    def clear(self, variable: Any) -> Any:
        """See Variables."""
        return variable.assign(tf.zeros_like(variable), read_value=False)

    def is_zero(self, value: Any) -> Any:
        """See Variables."""
        return tf.equal(value, 0)

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """See Variables."""
        return after(done)

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """See Variables."""
        return tf.cond(condition, then, otherwise)
