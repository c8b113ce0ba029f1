"""When weights of MXNet take turns: after steps whose end is known, and else before steps.

Belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perseus import basics
from perseus.gradients.outcome import Outcome
from perseus.gradients.participation import alone
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import Held
from perseus.gradients.rotation import parts_of
from perseus.mxnet.reducer import GradientReducer
from perseus.mxnet.rotation import Weight, WeightRotation
from perseus.mxnet.step_keys import StepKeys
from perseus.worlds import outlives_worlds


class WeightTurns:
    """The rotation of a trainer, which knows its weights and where its steps end.

    It exists in worlds in which weights are averaged. plan: whose compression decides that,
    together with the settings. name: see Rotation. weight_of, keys_of: see WeightRotation.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        weight_of: Callable[[Any], Weight],
        keys_of: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._plan = plan
        self._name = name
        self._weight_of = weight_of
        self._keys_of = keys_of
        self._rotation: WeightRotation | None = None
        if basics.is_initialized():
            parts_of(plan)  # settings that exclude each other are an error here

    def rotation(self) -> WeightRotation | None:
        """Return the rotation of this world; None if gradients are averaged instead."""
        parts = parts_of(self._plan)
        if parts == 1 or alone():
            self._rotation = None
        elif self._rotation is None or self._rotation.parts != parts:
            members = self._plan.process_set
            self._rotation = WeightRotation(
                self._weight_of, self._keys_of, self._name, members, parts
            )
        return self._rotation

    def take(self, keys: Sequence[Any]) -> None:
        """Take a turn. All ranks call it once in each step whose gradients are applied.

        keys: those of all weights that are trained.
        """
        rotation = self.rotation()
        if rotation is not None:
            rotation.use(keys)
            rotation.take_turn()

    def finish(self) -> None:
        """See Turns."""
        if self._rotation is not None:
            self._rotation.finish()

    def drop(self) -> None:
        """See Turns."""
        if self._rotation is not None:
            self._rotation.drop()


class TurningSource:
    """A Source, see gradients.residuals, of an optimizer or a trainer whose weights may turn."""

    _reducer: GradientReducer
    _turns: WeightTurns

    def residuals(self) -> dict[str, Held]:
        """See gradients.residuals.Source; waits for gradients."""
        self._reducer.wait()
        return self._reducer.residuals.read()

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """See gradients.residuals.Source. Drops sums over steps and corrections, too."""
        self._turns.drop()
        self._reducer.wait()
        self._reducer.go_on_with(residuals, owner)


class _Averaged:
    """The keys of weights that take turns, the same on all ranks between steps."""

    def __init__(self) -> None:
        self.known: set[Any] = set()  # of steps that have ended
        self.new: set[Any] = set()  # of the present step

    def learn(self) -> None:
        """Let the present step end."""
        self.known |= self.new
        self.new.clear()

    def everything(self) -> Sequence[Any]:
        """Return all keys, in one order on all ranks."""
        return sorted(self.known | self.new, key=str)


class WeightTurnsByKey(WeightTurns):
    """The rotation of an optimizer or a store, which gets its steps key by key; see StepKeys.

    A new key takes part from the next step on: before that, ranks have the same weights anyway.
    Every world has a first step, even for what has been trained before, since it has one for new
    ranks; until then, the keys of the last world are those that synchronize_parameters() averages.
    """

    def __init__(self, plan: Plan, name: str, weight_of: Callable[[Any], Weight]) -> None:
        self._averaged = averaged = _Averaged()
        super().__init__(plan, name, weight_of, averaged.everything)
        self._steps = StepKeys()
        self._outcomes: set[Outcome] = set()
        self._has_turned = False
        outlives_worlds(self)

    def begin_world(self) -> None:
        """See Lasting."""
        self._steps = StepKeys()
        self._outcomes.clear()

    def drop(self) -> None:
        """See Turns. A step that a failure has cut short takes no turn."""
        super().drop()
        if self._steps.give_up():
            self._averaged.new.clear()
            self._outcomes.clear()

    def before_update(self, key: Any) -> None:
        """Call it before each key's update. With after_update(), turns are taken after steps.

        A step has ended when all keys of the step before have been updated. If some do not come
        this time, its turn is taken when the next step begins.
        """
        if self._begins(key):
            self._take_if_due()
            self._outcomes.clear()
            self._has_turned = False

    def after_update(self, key: Any, outcome: Outcome, is_averaged: bool = True) -> None:
        """Call it after each key's update, or instead, if `outcome` rules that out.

        is_averaged: whether this key's weight takes turns.
        """
        self._outcomes.add(outcome)
        if is_averaged:
            self._averaged.new.add(key)
        if self._steps.is_complete():
            self._take_if_due()

    def before_others_update(self, key: Any, applies: bool) -> None:
        """Call it for each key instead if others make the updates, whose end is not known.

        The turn is taken with the first key that is to be applied, before the step.
        """
        if self._begins(key):
            self._has_turned = False
        self._averaged.new.add(key)
        if applies and not self._has_turned:
            self._has_turned = True
            self.take(sorted(self._averaged.known, key=str))

    def _begins(self, key: Any) -> bool:
        begins = self._steps.begins(key)
        if begins:
            self._averaged.learn()
            if self._steps.is_first:
                self._averaged.known.clear()
        return begins

    def _take_if_due(self) -> None:
        applies = Outcome.REDUCED in self._outcomes and Outcome.SKIPPED not in self._outcomes
        if applies and not self._has_turned:
            self._has_turned = True
            self.take(sorted(self._averaged.known, key=str))
