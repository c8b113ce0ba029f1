"""What the reducers of every framework have in common: their gradients in the core.

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
    """Reduces gradients by a plan, each framework's in its own way.

    number: of these gradients in the core, see perseus_request.gradient_of. The core forgets them
        with this object. residuals: what lossy codecs hold back of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.number = basics.new_gradients()
        self.residuals = Residuals(self.number, plan.process_set.process_set_id)
        weakref.finalize(self, basics.forget_gradients, self.number).atexit = False

    def forget(self) -> None:
        """Drop what was summed over steps and held back: the next step begins a new sum."""
        basics.forget_gradients(self.number)
        self.residuals.replace({})

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """Have what was read before replace what is; owner: see Source.go_on_with."""
        self.forget()
        self.residuals.replace(own(residuals, owner))
        if basics.is_initialized():
            self.residuals.hand_over_known()


class LateReducer:
    """A Source whose reducer is made when it is first used: what is loaded before waits for it."""

    def __init__(self) -> None:
        self._reducer: Any = None  # the framework's Reducer
        self._loaded: tuple[Mapping[str, Held], int | None] = ({}, None)  # before _reducer

    def residuals(self) -> dict[str, Held]:
        """See Source. By names that are the same in every process."""
        return own(*self._loaded) if self._reducer is None else self._reducer.residuals.read()

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """See Source."""
        if self._reducer is None:
            self._loaded = residuals, owner
        else:
            self._reducer.go_on_with(residuals, owner)
