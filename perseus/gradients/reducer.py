"""The base of every framework's reducer: the state that the core keeps of its gradients.

Belongs to the thread that steps the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from perseus import basics
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import Held, Residuals, own


class Reducer:
    """Reduces gradients according to a plan; each framework has its own subclass.

    number: identifies these gradients in the core; see perseus_request.gradient_of. The core drops
        their state when this object is destroyed.
    residuals: the residuals that lossy codecs keep of these gradients.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.number = basics.new_gradients()
        self.residuals = Residuals(self.number, plan.process_set)
        weakref.finalize(self, basics.forget_gradients, self.number).atexit = False

    def forget(self) -> None:
        """Drop the core's sums over steps and the residuals; the next step begins a new sum."""
        basics.forget_gradients(self.number)
        self.residuals.replace({})

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """Replace the residuals with earlier ones, and drop sums. See Source.go_on_with."""
        self.forget()
        self.residuals.replace(own(residuals, owner))
        if basics.is_initialized():
            self.residuals.hand_over_known()


class LateReducer:
    """A Source whose reducer is created on first use, and which keeps residuals loaded before."""

    def __init__(self) -> None:
        self._reducer: Any = None  # the framework's Reducer
        # The residuals that were loaded before there was a reducer, and their owner.
        self._loaded: tuple[Mapping[str, Held], int | None] = ({}, None)

    def residuals(self) -> dict[str, Held]:
        """See Source. The keys are equal in every process."""
        return own(*self._loaded) if self._reducer is None else self._reducer.residuals.read()

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """See Source."""
        if self._reducer is None:
            self._loaded = residuals, owner
        else:
            self._reducer.go_on_with(residuals, owner)
