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
from perseus.keras.backend import backend
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


class GradientAggregation:
    """Sums the gradients of several calls of one optimizer's apply.

    Calls with other variables have sums and a count of their own, because a script may train the
    two parts of a model in turn by one optimizer, or unfreeze some variables. The sums are not
    variables of the optimizer, so it saves the same state as without them.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._number, self._average = passes, average
        self._passes: dict[tuple[int, ...], LocalAggregation] = {}  # by indices in the optimizer
        self.counter: Any = None  # of the last call; None before the first one

    def forget(self) -> None:
        """Begin with the first pass of a step, and with sums of zeros; not within a graph."""
        for passes in self._passes.values():
            passes.forget()

    def add_call(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        indices: Sequence[int],
        complete: Callable[[list[Any]], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """Add the gradients of one pass; see LocalAggregation.add.

        gradients: dense or None. indices: the index of each variable in the optimizer.
        """
        passes = self._passes_of(variables, tuple(indices))
        self.counter = passes.counter
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]

        def complete_with_none(totals: list[Any]) -> Any:
            full: list[Any] = [None] * len(gradients)
            for i, total in zip(present, totals, strict=True):
                full[i] = total
            return complete(full)

        sums = [passes.sums[i] for i in present]
        given = [gradients[i] for i in present]
        return passes.add(sums, given, complete_with_none, lambda _: otherwise())

    def _passes_of(self, variables: Sequence[Any], indices: tuple[int, ...]) -> LocalAggregation:
        """Return the passes with gradients of exactly these variables."""
        passes = self._passes.get(indices)
        if passes is None:
            passes = LocalAggregation(self._number, self._average, _Variables())
            with backend.outside_functions():
                passes.counter = _own((), "int32", "counter")
                passes.sums = [_own(each.shape, each.dtype, "sum") for each in variables]
            for total, variable in zip(passes.sums, variables, strict=True):
                total.overwrite_with_gradient = is_overwritten(variable)
            self._passes[indices] = passes
        return passes


def _own(shape: Sequence[int], dtype: str, name: str) -> Any:
    return keras.Variable(keras.ops.zeros(shape, dtype), trainable=False, name=name)
