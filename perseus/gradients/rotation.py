"""Parameters that optimizers of the Horovod interfaces average in turn; see gradients.turns.

An adapter has one Rotation for each optimizer. synchronize_parameters() makes replicas equal.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter

from perseus import basics, control
from perseus.compression import ROTATE, SETTINGS, Compressor
from perseus.gradients.parameter_check import SETTING as PARAMETER_CHECK
from perseus.gradients.turns import SETTING, Turns
from perseus.process_sets import ProcessSet


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


class Rotation(Turns):
    """The parameters of one optimizer.

    name: matches exchanges across ranks. If several have one name, as the optimizers of two models
        whose parameters are named alike, they are numbered in the order of creation, because what
        one has under way waits for its next step. process_set: the ranks that take part.
    """

    def __init__(self, name: str, process_set: ProcessSet, parts: int) -> None:
        self._base = name
        self.process_set = process_set
        super().__init__(_numbered(name), parts)
        _living.append(weakref.ref(self))

    def begin_world(self) -> None:
        """Forget the last world's turn and what was under way."""
        self.name = _numbered(self._base)
        self._turn = 0
        self._pending = None


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
