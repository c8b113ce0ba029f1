"""backward_passes_per_step: gradients of several calls, summed on this rank before they travel.

Belongs to the thread that applies gradients. Source of behaviour: Horovod 0.28.1,
horovod.tensorflow.gradient_aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class LocalAggregation:
    """One sum for each variable of an optimizer, and how many calls are in them.

    They are no variables of the optimizer, so what it saves is what it saves without them.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.counter: Any = None
        self._sums: list[Any] = []

    def build(self, variables: Sequence[Any]) -> None:
        """Make the sums."""
        self.counter = keras.Variable(0, dtype="int32", trainable=False, name="counter")
        self._sums = [
            keras.Variable(
                keras.ops.zeros(variable.shape, variable.dtype), trainable=False, name="sum"
            )
            for variable in variables
        ]

    def add(self, gradients: Sequence[Any], indices: Sequence[int]) -> Any:
        """Add dense gradients, of variables by their place; returns whether the sums are due."""
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                self._sums[index].assign_add(gradient)
        self.counter.assign((self.counter + 1) % self.passes)
        return keras.ops.equal(self.counter, 0)

    def take(self, gradients: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """The sums in the place of gradients, where there are some; they begin anew."""
        taken: list[Any] = []
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is None:
                taken.append(None)
                continue
            total = self._sums[index]
            taken.append(keras.ops.copy(total))
            total.assign(keras.ops.zeros(total.shape, total.dtype))
        return taken
