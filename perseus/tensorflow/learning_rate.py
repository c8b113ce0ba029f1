"""The learning rate by which codecs weigh what they have held back. Pure function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PROPORTIONAL = (
    tf.compat.v1.train.GradientDescentOptimizer,
    tf.compat.v1.train.MomentumOptimizer,
)


def learning_rate(optimizer: Any) -> Any:
    """Return the rate of the next step of a tf.compat.v1 optimizer: a number, tensor or variable.

    It is None, for a rate that is not known, if steps are not proportional to both the rate and the
    gradient: those of GradientDescentOptimizer and MomentumOptimizer are, but others may not be,
    even if they are derived from these. A function that the optimizer calls for the rate is not
    called here as well, because it may count its calls.
    """
    rate = optimizer._learning_rate if type(optimizer) in _PROPORTIONAL else None
    return None if callable(rate) else rate
