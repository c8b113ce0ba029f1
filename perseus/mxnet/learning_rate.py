"""The learning rate by which codecs weigh what they have held back. Pure function."""

from __future__ import annotations

from typing import Any

import mxnet as mx


def learning_rate(optimizer: Any) -> float:
    """Return the rate of an optimizer's next step, without parameters' own factors.

    It is 0, for a rate that is not known, if the optimizer's steps are not proportional to both the
    rate and the gradient: for all but SGD and NAG, and without an optimizer.
    """
    proportional = isinstance(optimizer, (mx.optimizer.SGD, mx.optimizer.NAG))
    return float(optimizer.learning_rate) if proportional else 0.0
