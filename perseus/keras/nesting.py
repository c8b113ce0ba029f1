"""Keras' optimizers that contain others: LossScaleOptimizer and MultiOptimizer. Stateless."""

from __future__ import annotations

from typing import Any


def with_inner(optimizer: Any) -> list[Any]:
    """Return an optimizer without the LossScaleOptimizer around it, then those inside it, if any.

    A MultiOptimizer with a function that chooses may ask it only when it is built.
    """
    unscaled = getattr(optimizer, "inner_optimizer", optimizer)
    return [unscaled, *getattr(unscaled, "optimizers", ())]
