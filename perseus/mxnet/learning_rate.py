"""The learning rate by which codecs weigh what they have held back. Pure function."""

from __future__ import annotations

from typing import Any

import mxnet as mx


def learning_rate(optimizer: Any) -> float:
    """Return the rate of an optimizer's next step, without parameters' own factors.

    It is 0, for a rate that is not known, without an optimizer, and if steps are not proportional
    to both the rate and the gradient: those of SGD and NAG are, but others may not be, even if they
    are derived from these.
    """
    proportional = type(optimizer) in {mx.optimizer.SGD, mx.optimizer.NAG}
    return float(optimizer.learning_rate) if proportional else 0.0
