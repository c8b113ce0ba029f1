"""Averages another N-th of the parameters in every step, instead of gradients.

Each rank steps with its own host's gradients. Before that it sends a part of its parameters, and
all ranks' average comes while the next gradients are computed. Then every rank adds what the
average differs by from what it sent, so nobody waits, and what the step has changed stays.
Replicas differ a little in between; synchronize_parameters() makes them equal. (SPARTA: Baioumy and
Cheema 2025, Sparse parameter averaging; gossip: Assran et al. 2019, Stochastic gradient push.)

An adapter has one Rotation for each optimizer. It belongs to the thread that steps.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from perseus import basics, control
from perseus.compression import ROTATE, SETTINGS, Compressor
from perseus.errors import HorovodInternalError
from perseus.gradients.parameter_check import SETTING as PARAMETER_CHECK
from perseus.process_sets import ProcessSet

SETTING = "PERSEUS_DOWNSAMPLE_N_ELEMENTS"


def parts_of(compression: type[Compressor]) -> int:
    """Return N if an optimizer is to average an N-th of its parameters in each step, else 1.

    Raises ValueError if settings forbid that parameters differ between ranks.
    """
    parts = 1
    if compression.codec == ROTATE:
        parts = int(compression.argument) or basics.setting(SETTING)
    elif compression.codec == SETTINGS:
        parts = basics.setting(SETTING)
    if parts > 1 and basics.setting(PARAMETER_CHECK) > 0:
        raise ValueError(
            f"[rotate] parameters differ between ranks while each step averages 1/{parts} of them, "
            f"so {PARAMETER_CHECK} cannot compare them: unset it, or {SETTING}."
        )
    return parts


def rows_of(count: int, part: int, parts: int) -> slice:
    """Return the rows of a tensor with `count` rows that belong to a part, 0 <= part < parts."""
    return slice(count * part // parts, count * (part + 1) // parts)


class Rotation(ABC):
    """The parameters of one optimizer, which are averaged in turn; see the module.

    name: matches exchanges across ranks. If several have one name, as the optimizers of two models
        whose parameters are named alike, they are numbered in the order of creation, because what
        one has under way waits for its next step. process_set: the ranks that take part. parts: in
        so many steps each parameter is averaged once.
    """

    def __init__(self, name: str, process_set: ProcessSet, parts: int) -> None:
        self._base = name
        self.name = _numbered(name)
        self.process_set = process_set
        self.parts = parts
        self._turn = 0
        self._pending: Any = None
        _living.append(weakref.ref(self))

    def take_turn(self) -> None:
        """Correct the parameters that were sent in the step before, and send the next ones.

        A collective, once per step: between the reduction of gradients and their application.
        """
        self.finish()
        self._pending = self.send(self._turn)
        self._turn = (self._turn + 1) % self.parts

    def finish(self) -> None:
        """Wait for what is under way and correct the parameters. Not a collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.correct(pending)

    def drop(self) -> None:
        """Wait for what is under way and forget it: other values replace the parameters."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # The world may have ended.
        with contextlib.suppress(HorovodInternalError):
            self.receive(pending)

    def make_equal(self) -> None:
        """Give all parameters the average of all ranks. A collective."""
        self.finish()
        for part in range(self.parts):
            pending = self.send(part)
            if pending is not None:
                self.replace(pending)

    def begin_world(self) -> None:
        """Forget the last world's turn and what was under way."""
        self.name = _numbered(self._base)
        self._turn = 0
        self._pending = None

    @abstractmethod
    def send(self, part: int) -> Any:
        """Start averaging a part; None if it has no elements."""

    @abstractmethod
    def receive(self, pending: Any) -> Any:
        """Wait, and return the average of what send() sent."""

    @abstractmethod
    def correct(self, pending: Any) -> None:
        """Receive, and add what the average differs by from what was sent."""

    @abstractmethod
    def replace(self, pending: Any) -> None:
        """Receive, and give the parameters the bits of the average."""


_living: list[weakref.ref[Rotation]] = []
_numbers: Counter[str] = Counter()


def _numbered(name: str) -> str:
    _numbers[name] += 1
    return name if _numbers[name] == 1 else f"{name}#{_numbers[name]}"


def _rotations() -> list[Rotation]:
    """Return what is in use, in the order of creation, which is the same on all ranks."""
    return [rotation for reference in _living if (rotation := reference()) is not None]


def _living_everywhere() -> list[Rotation]:
    """Return those that all members of their process sets still have, in one order. A collective.

    Ranks collect the garbage of optimizers at different times.
    """
    mine = {rotation.name: rotation for rotation in _rotations()}
    names = json.dumps(list(mine))
    gathered = [set(json.loads(line)) for line in control.gather_lines(names, "rotate.living")]

    def everywhere(rotation: Rotation) -> bool:
        members = basics.group_ranks(rotation.process_set.process_set_id or 0) or []
        return all(rotation.name in gathered[rank] for rank in members)

    return [mine[name] for name in sorted(mine) if everywhere(mine[name])]


def synchronize_parameters() -> None:
    """Make the parameters of all optimizers that use `Compression.rotate` equal on all ranks.

    They become the average of all ranks. Without such an optimizer it does nothing. Call it on all
    ranks before evaluation and checkpoints; a checkpoint that rank 0 alone saves without it has
    rank 0's replica. Broadcasts need no call before them, and elastic commits make it themselves.
    """
    # After the first rotation of a process, on all ranks.
    if _living:
        for rotation in _living_everywhere():
            rotation.make_equal()


def finish_corrections() -> None:
    """Apply what is under way, before parameters are overwritten. Not a collective."""
    for rotation in _rotations():
        rotation.finish()


def _begin_world() -> None:
    _numbers.clear()
    for rotation in _rotations():
        rotation.begin_world()


basics.at_init(_begin_world)
