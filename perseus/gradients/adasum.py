"""op=Adasum of an optimizer: every rank takes a step of its own, and the steps are combined.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
Belongs to the thread that steps the optimizer, or that builds the graph which does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any


class AdasumOfSteps(ABC):
    """Takes variables from a start that all ranks share to the start plus the Adasum of all steps.

    An adapter says what this is in its framework, which acts at once or builds a graph.
    """

    def around(self, variables: Sequence[Any], step: Callable[[], Any]) -> tuple[Any, Any]:
        """Take a step and combine it; returns what step() and combine() do."""
        starts = self.copies(variables)
        with self.after(starts):
            stepped = step()
        with self.after([stepped]):
            return stepped, self.combine(variables, starts)

    def combine(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """Combine the steps that have led here from the starts; returns what write() does."""
        steps = self.reduce(
            self.value(variable) - start for variable, start in zip(variables, starts, strict=True)
        )
        if steps is None:
            return self.write(variables, starts)
        ends = [start + step for start, step in zip(starts, steps, strict=True)]
        return self.write(variables, ends)

    @abstractmethod
    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Where the variables are now, which the step leaves alone."""

    @abstractmethod
    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """What is within it comes after these; None among them is nothing to wait for."""

    @abstractmethod
    def value(self, variable: Any) -> Any:
        """Where a variable is now."""

    @abstractmethod
    def reduce(self, steps: Iterable[Any]) -> Sequence[Any] | None:
        """The Adasum of every step over all ranks; None where all have to go back to the starts."""

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> Any:
        """Set variables to values; may return the operation that does it."""
