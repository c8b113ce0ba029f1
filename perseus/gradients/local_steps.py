"""Local steps: hosts step on their own, and average what has become of them every K steps.

The ranks of a host average gradients in every step, so they are one worker. This module knows when
an exchange is sent and when its result is due; an adapter knows what is sent and what becomes of
it. Everything happens at steps that all ranks count alike and never when a message happens to
arrive, so that results do not depend on timing. (Stich 2019, Local SGD converges fast; Douillard et
al. 2025, Streaming DiLoCo.)

Local steps belong to the thread that steps.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from operator import index
from typing import Any, NamedTuple, Protocol

from perseus import basics
from perseus.errors import HorovodInternalError
from perseus.gradients.parameter_check import SETTING as PARAMETER_CHECK
from perseus.gradients.rotation import Rotation
from perseus.process_sets import ProcessSet


class UnderWay(Protocol):
    """An exchange of one part. due: the step after which its result is applied."""

    part: int
    due: int

    def received(self) -> bool:
        """Return whether it has been received and needs its world no more."""


class Pace(NamedTuple):
    """When each part of the parameters is exchanged: every `every` steps.

    Parts are exchanged at different steps, so that the traffic is even. delay: the steps between an
    exchange and the application of its result, 0 to `every`; 0 = all ranks wait for it.
    """

    every: int
    parts: int
    delay: int

    def is_due(self, part: int, turn: int) -> bool:
        """Return whether a part is exchanged after a step, of which the first is 1."""
        return self.next_due(part, turn - 1) == turn

    def next_due(self, part: int, turn: int) -> int:
        """Return the first step, of those later than `turn`, after which a part is exchanged."""
        first = (part + 1) * self.every // self.parts
        return turn + 1 + (first - turn - 1) % self.every


class LocalSteps(Rotation):
    """The parameters of one optimizer, whose parts are exchanged at some pace."""

    def __init__(self, name: str, process_set: ProcessSet, pace: Pace) -> None:
        self.pace = pace
        self._under_way: list[Any] = []  # of UnderWay, the first due first
        self._agreed = False
        self._owes_turn = False
        self._ends_step = False  # end_step() has begun, and an interrupt may have ended it
        super().__init__(name, process_set, pace.parts)

    def begin_step(self) -> None:
        """Call this before a step is applied. The first call in a world is a collective.

        It goes on with an end_step() that an interrupt has ended.
        """
        if self._ends_step:
            self.end_step()
        self._apply_due(self._turn)
        if not self._agreed:
            self.agree()
            self._agreed = True
        self._owes_turn = True

    def end_step(self) -> None:
        """Call this after a step: apply what is due and send what is next. A collective.

        Without a call of begin_step() before, it does nothing. A rank that did not apply the step,
        because a gradient scaler has skipped it, calls it before it waits for anything else.
        """
        if self._owes_turn:
            self._ends_step = True
            self.take_turn()

    def take_turn(self) -> None:
        """See Turns."""
        turn = self._turn + 1
        due = turn + self.pace.delay
        sent = {each.part for each in self._under_way if each.due == due}  # before an interrupt
        self._apply_due(turn)
        for part in range(self.parts):
            if self.pace.is_due(part, turn) and part not in sent:
                begun = self.begin(part, due)
                if begun is not None:
                    self._under_way.append(begun)
        self._under_way.sort(key=lambda each: each.due)  # what was loaded may be due later
        self._turn, self._owes_turn, self._ends_step = turn, False, False
        if self.pace.delay == 0:
            self._apply_due(turn)

    def finish(self) -> None:
        """Apply what is under way, before other values replace the parameters.

        Ranks compare their states again before the next step, because those values may have come
        with a state that one rank has loaded.
        """
        self.end_step()
        self._apply_due(None)
        self._agreed = False

    def drop(self) -> None:
        """See Turns."""
        dropped, self._under_way = self._under_way, []
        self._owes_turn = self._ends_step = False
        for begun in dropped:
            # The world may have ended.
            with contextlib.suppress(HorovodInternalError):
                self.wait(begun)

    def settle(self) -> None:
        """See Turns. A collective: a rank that has skipped a step takes its turn first."""
        self.end_step()
        self._apply_due(None)

    def average_all(self) -> None:
        """See Turns."""
        # What travels is parameters, whatever the exchanges of steps send.
        for pending in [self.send(part) for part in range(self.parts)]:
            if pending is not None:
                self.replace(pending)

    def restart(self) -> None:
        """See Rotation: ranks agree on the step before the next one."""
        self._agreed = False

    def begin_world(self) -> None:
        """Go on at the same step. What is under way and not received has ended with its world."""
        turn = self._turn
        super().begin_world()
        self._turn = turn
        self._under_way = [begun for begun in self._under_way if begun.received()]
        self._agreed = self._owes_turn = self._ends_step = False

    def _apply_due(self, turn: int | None) -> None:
        """Apply what is due after a step; None: all."""
        while self._under_way and (turn is None or self._under_way[0].due <= turn):
            try:
                self.wait(self._under_way[0])
            except Exception:  # it has failed; Ctrl-C leaves it under way
                del self._under_way[0]
                raise
            self.apply(self._under_way.pop(0))

    @abstractmethod
    def agree(self) -> None:
        """Take over the state of the rank that has the newest, unless all have the same."""

    @abstractmethod
    def begin(self, part: int, due: int) -> Any:
        """Start exchanging a part, as UnderWay; None if there is nothing to exchange."""

    @abstractmethod
    def wait(self, begun: Any) -> None:
        """Wait for an exchange and keep its result."""

    @abstractmethod
    def apply(self, begun: Any) -> None:
        """Wait for an exchange and apply its result."""


def check_parameters_may_differ(what: str) -> None:
    """Raise ValueError if settings compare parameters, which differ between exchanges."""
    if basics.setting(PARAMETER_CHECK) > 0:
        raise ValueError(
            f"[{what}] parameters differ between hosts until they are averaged, so "
            f"{PARAMETER_CHECK} cannot compare them: unset it."
        )


def check_count(
    where: str, what: str, value: Any, *, least: int, most: int | None = None, why: str = ""
) -> None:
    """Raise ValueError unless an argument is a whole number from `least` to `most`.

    why: what limits it, for the message.
    """
    try:
        fits = least <= index(value) and (most is None or index(value) <= most)
    except TypeError:
        fits = False
    if not fits or isinstance(value, bool):
        expected = f"{least} or more" if most is None else f"{least} to {most}{why}"
        raise ValueError(f"[{where}] {what}={value!r}: expected a whole number, {expected}")


def check_outer_gradients_travel() -> None:
    """Raise ValueError if settings would keep the core from sending outer gradients."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            "[DiLoCo] PERSEUS_ACCUMULATE_N_STEPS would also sum outer gradients: unset it and use "
            "backward_passes_per_step"
        )


def check_outer_optimizer(rate: Any, momentum: Any) -> None:
    """Raise ValueError unless 0 < rate and 0 <= momentum < 1."""
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ValueError(f"[DiLoCo] outer_lr={rate!r}: expected a number above 0")
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"[DiLoCo] outer_momentum={momentum!r}: expected 0 up to below 1")
