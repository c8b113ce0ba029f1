"""op=Adasum of an optimizer: every rank takes its own step, and Adasum combines the steps.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
Belongs to the thread that steps the optimizer, or that builds the graph which steps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any


class AdasumOfSteps(ABC):
    """Updates variables from start values, equal on all ranks, to these plus the Adasum of steps.

    An adapter implements the operations for its framework, either at once or as parts of a graph.
    """

    def around(self, variables: Sequence[Any], step: Callable[[], Any]) -> tuple[Any, Any]:
        """Take this rank's step and combine it; return the results of step() and combine()."""
        starts = self.copies(variables)
        with self.after(starts):
            stepped = step()
        with self.after([stepped]):
            return stepped, self.combine(variables, starts)

    def combine(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """Combine the steps from `starts` to the present values; return the result of write()."""
        steps = self.reduce(
            self.value(variable) - start for variable, start in zip(variables, starts, strict=True)
        )
        if steps is None:
            return self.write(variables, starts)
        ends = [start + step for start, step in zip(starts, steps, strict=True)]
        return self.write(variables, ends)

    @abstractmethod
    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Return copies of the variables' values, which the step does not change."""

    @abstractmethod
    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context whose operations run after those in `done`; None entries are ignored."""

    @abstractmethod
    def value(self, variable: Any) -> Any:
        """Return the present value of a variable."""

    @abstractmethod
    def reduce(self, steps: Iterable[Any]) -> Sequence[Any] | None:
        """Return the Adasum of each step over all ranks; None if all must restore `starts`."""

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> Any:
        """Assign values to variables; in a graph, return the operation that does so."""
