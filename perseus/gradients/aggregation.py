"""backward_passes_per_step: gradients of several passes, summed on this rank before they travel.

Belongs to the thread that applies gradients, or that builds the graph which does. PyTorch needs
none of it: there autograd sums in p.grad, and hooks count in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Variables(Protocol):
    """A rank's own variables in the terms of a framework, which acts at once or builds a graph."""

    def read(self, variable: Any) -> Any:
        """Its present value."""

    def kept(self, value: Any) -> Any:
        """What read() gave, so that later changes of the variable leave it alone."""

    def assign(self, variable: Any, value: Any) -> Any:
        """Set it; returns what after() takes."""

    def add(self, variable: Any, value: Any) -> Any:
        """Add to it; returns what after() takes."""

    def clear(self, variable: Any) -> Any:
        """Set it to zeros; returns what after() takes."""

    def is_zero(self, value: Any) -> Any:
        """Whether a scalar is 0, as choose() takes it."""

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """What is within it comes after these."""

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """What one of two functions returns, as the condition says."""


class Passes:
    """Counts backward passes, of which every N-th completes a step.

    number: N, at least 1. counter: a scalar variable of integers, from 0 to N - 1, which the
    adapter makes: graphs count, too.
    """

    def __init__(self, number: int, variables: Variables) -> None:
        self.number = number
        self.counter: Any = None
        self._variables = variables

    def begins(self) -> Any:
        """Whether the present pass is the first one of a step."""
        return self._variables.is_zero(self._variables.read(self.counter))

    def count(self) -> Any:
        """Count the present pass; returns whether it completes a step."""
        variables = self._variables
        counted = variables.assign(self.counter, (variables.read(self.counter) + 1) % self.number)
        with variables.after([counted]):
            return self.begins()


class LocalAggregation(Passes):
    """Sums up gradients over the passes of a step. average: divide the sums by their number."""

    def __init__(self, number: int, average: bool, variables: Variables) -> None:
        super().__init__(number, variables)
        self.average = average

    def add(
        self,
        sums: Sequence[Any],
        gradients: Sequence[Any],
        complete: Callable[[list[Any]], Any],
        otherwise: Callable[[list[Any]], Any],
    ) -> Any:
        """Add a pass. Returns complete(totals) where it completes a step, else otherwise(totals).

        sums: variables; gradients: a dense one for each. The sums begin anew before complete().
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
                taken = [total / self.number for total in taken]
            with variables.after(taken):
                cleared = [variables.clear(total) for total in sums]
            with variables.after(cleared):
                return complete(taken)

        return variables.choose(due, take, lambda: otherwise(totals))
