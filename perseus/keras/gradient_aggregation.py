"""backward_passes_per_step for Keras 3; see perseus.gradients.aggregation.

Belongs to the thread that applies gradients. Source of behaviour: Horovod 0.28.1,
horovod.tensorflow.gradient_aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from perseus.gradients.aggregation import LocalAggregation
from perseus.keras.reducer import is_overwritten


class _Variables:
    """See Variables. Keras itself keeps the order of operations that change variables.

    The "sum" of a variable that is overwritten with its gradients is a maximum, as in Keras.
    """

    def read(self, variable: Any) -> Any:
        """See Variables."""
        return variable

    def kept(self, value: Any) -> Any:
        """See Variables."""
        return keras.ops.copy(value)

    def assign(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        return variable.assign(value)

    def add(self, variable: Any, value: Any) -> Any:
        """See Variables."""
        if is_overwritten(variable):
            return variable.assign(keras.ops.maximum(variable, value))
        return variable.assign_add(value)

    def mean(self, variable: Any, total: Any, number: int) -> Any:
        """See Variables."""
        return total if is_overwritten(variable) else total / number

    def clear(self, variable: Any) -> Any:
        """See Variables."""
        return variable.assign(keras.ops.zeros(variable.shape, variable.dtype))

    def clear_now(self, variable: Any) -> None:
        """See Variables."""
        self.clear(variable)

    def is_zero(self, value: Any) -> Any:
        """See Variables."""
        return keras.ops.equal(value, 0)

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """See Variables."""
        del done
        return nullcontext()

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """See Variables."""
        return keras.ops.cond(condition, then, otherwise)


class GradientAggregation(LocalAggregation):
    """Keeps one sum for each variable of an optimizer, and counts the passes in the sums.

    The sums are not variables of the optimizer, so it saves the same state as without them.
    """

    def __init__(self, passes: int, average: bool) -> None:
        super().__init__(passes, average, _Variables())

    def build(self, variables: Sequence[Any]) -> None:
        """Create the counter and the sums, which are zeros of the variables' shapes and dtypes."""
        self.counter = keras.Variable(0, dtype="int32", trainable=False, name="counter")
        self.sums = [
            keras.Variable(
                keras.ops.zeros(variable.shape, variable.dtype), trainable=False, name="sum"
            )
            for variable in variables
        ]
        for total, variable in zip(self.sums, variables, strict=True):
            total.overwrite_with_gradient = is_overwritten(variable)

    def add_call(
        self,
        gradients: Sequence[Any],
        indices: Sequence[int],
        complete: Callable[[list[Any]], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """Add the gradients of one pass; see LocalAggregation.add.

        gradients: dense or None. indices: the index in the optimizer of each gradient's variable.
        """
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]

        def complete_with_none(totals: list[Any]) -> Any:
            full: list[Any] = [None] * len(gradients)
            for i, total in zip(present, totals, strict=True):
                full[i] = total
            return complete(full)

        sums = [self.sums[indices[i]] for i in present]
        given = [gradients[i] for i in present]
        return self.add(sums, given, complete_with_none, lambda _: otherwise())
