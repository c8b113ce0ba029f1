"""backward_passes_per_step: sums the gradients of several passes on this rank, then reduces them.

Belongs to the thread that applies gradients, or that builds the graph which applies them. PyTorch
does not need it: autograd accumulates in p.grad, and hooks count passes in Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from perseus import basics


class Variables(Protocol):
    """A framework's operations on a rank's own variables, run at once or as parts of a graph."""

    def read(self, variable: Any) -> Any:
        """Return the present value of a variable."""

    def kept(self, value: Any) -> Any:
        """Return a result of read() such that later changes of the variable do not change it."""

    def assign(self, variable: Any, value: Any) -> Any:
        """Set a variable; return the operation, for after()."""

    def add(self, variable: Any, value: Any) -> Any:
        """Add a value to a variable; return the operation, for after()."""

    def mean(self, variable: Any, total: Any, number: int) -> Any:
        """Return the mean of `number` values whose total in a variable is given."""

    def clear(self, variable: Any) -> Any:
        """Set a variable to zeros; return the operation, for after()."""

    def clear_now(self, variable: Any) -> None:
        """Set a variable to zeros at once, unless it belongs to a graph that a session runs."""

    def is_zero(self, value: Any) -> Any:
        """Return whether a scalar is 0, as a condition for choose()."""

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context whose operations run after those in `done`."""

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return the result of then() if the condition holds, else of otherwise()."""


_known: weakref.WeakSet[Passes] = weakref.WeakSet()


class Passes:
    """Counts backward passes, of which every N-th completes a step.

    number: N, at least 1. counter: a scalar integer variable with values 0 to N - 1. The adapter
    creates it, because graphs count passes as well.
    """

    def __init__(self, number: int, variables: Variables) -> None:
        self.number = number
        self.counter: Any = None
        self._variables = variables
        _known.add(self)

    def forget(self) -> None:
        """Begin with the first pass of a step; not within a graph."""
        if self.counter is not None:
            self._variables.clear_now(self.counter)

    def take_back(self) -> None:
        """Undo what this rank alone has changed since the last step; not within a graph."""

    def begins(self) -> Any:
        """Return whether the present pass is the first of a step."""
        return self._variables.is_zero(self._variables.read(self.counter))

    def count(self) -> Any:
        """Count the present pass; return whether it completes a step."""
        variables = self._variables
        counted = variables.assign(self.counter, (variables.read(self.counter) + 1) % self.number)
        with variables.after([counted]):
            return self.begins()


class LocalAggregation(Passes):
    """Sums gradients over the passes of a step.

    average: divide sums by the number of passes. sums: all that add() gets; the adapter creates
    them.
    """

    def __init__(self, number: int, average: bool, variables: Variables) -> None:
        super().__init__(number, variables)
        self.average = average
        self.sums: list[Any] = []

    def forget(self) -> None:
        """Begin with the first pass of a step, and with sums of zeros; not within a graph."""
        super().forget()
        for total in self.sums:
            self._variables.clear_now(total)

    def add(
        self,
        sums: Sequence[Any],
        gradients: Sequence[Any],
        complete: Callable[[list[Any]], Any],
        otherwise: Callable[[list[Any]], Any],
    ) -> Any:
        """Add the gradients of one pass to the sums.

        Returns complete(totals) if the pass completes a step, else otherwise(totals).

        sums: variables. gradients: one dense gradient for each sum. The sums are set to zeros
            before complete() is called.
        """
        variables = self._variables
        added = [
            variables.add(total, gradient) for total, gradient in zip(sums, gradients, strict=True)
        ]
        with variables.after(added):
            totals = [variables.read(total) for total in sums]
        with variables.after(totals):
            due = self.count()

        def take() -> Any:
            taken = [variables.kept(total) for total in totals]
            if self.average:
                taken = [
                    variables.mean(variable, total, self.number)
                    for variable, total in zip(sums, taken, strict=True)
                ]
            with variables.after(taken):
                cleared = [variables.clear(total) for total in sums]
            with variables.after(cleared):
                return complete(taken)

        return variables.choose(due, take, lambda: otherwise(totals))


def forget_passes() -> None:
    """Drop the passes that all optimizers have counted since their last steps, and their sums.

    Ranks that count differently would wait for one another's reductions in different calls.
    """
    for passes in list(_known):
        passes.forget()


def _take_back() -> None:
    for passes in list(_known):
        passes.take_back()


basics.at_init(forget_passes)
basics.at_reset(_take_back)
