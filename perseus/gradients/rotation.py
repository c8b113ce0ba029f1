"""Parameters that optimizers of the Horovod interfaces average in turn; see gradients.turns.

An adapter has one Rotation for each optimizer. synchronize_parameters() makes replicas equal.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from typing import Any, NamedTuple

from perseus import basics, control
from perseus.arguments import OPS
from perseus.compression import ROTATE, SETTINGS
from perseus.gradients.parameter_check import SETTING as PARAMETER_CHECK
from perseus.gradients.plan import Plan
from perseus.gradients.turns import SETTING, Turns
from perseus.process_sets import ProcessSet


def parts_of(plan: Plan) -> int:
    """Return N if an optimizer is to average an N-th of its parameters in each step, else 1.

    The setting alone leaves operations exact that neither sum nor average, as that for codecs does.
    Raises ValueError if settings forbid that parameters differ between ranks.
    """
    parts, compression = 1, plan.compression
    if compression.codec == ROTATE:
        parts = int(compression.argument) or basics.setting(SETTING)
    elif compression.codec == SETTINGS and OPS[plan.op] in ("Average", "Sum"):
        parts = basics.setting(SETTING)
    if parts > 1:
        refuse_check(parts, basics.setting(PARAMETER_CHECK))
    return parts


def refuse_check(parts: int, every: int) -> None:
    """Raise ValueError if parameters, which differ between ranks, are to be compared.

    every: PERSEUS_PARAMETER_CHECK_N_STEPS.
    """
    if every > 0:
        raise ValueError(
            f"[rotate] parameters differ between ranks while each step averages 1/{parts} of them, "
            f"so {PARAMETER_CHECK} cannot compare them: unset it, or {SETTING}."
        )


class Rotation(Turns):
    """The parameters of one optimizer.

    name: matches exchanges across ranks; rotations may share it, as those of two models do whose
        parameters are named alike. process_set: the ranks that take part.
    """

    def __init__(self, name: str, process_set: ProcessSet, parts: int) -> None:
        super().__init__(name, parts)
        self.process_set = process_set
        self._number: int | None = None
        self.identity = f"{name}~{_next_of(_made, name)}"
        _living.append(weakref.ref(self))

    @property
    def name(self) -> str:
        """What exchanges are called.

        Rotations that share a name are numbered in the order of their first exchanges in this
        world, which is the same on all ranks. The order of creation is not: after an elastic
        restart, old ranks and new ones have made different numbers of optimizers, and ranks collect
        the garbage at different times.
        """
        if self._number is None:
            group = self.process_set.process_set_id
            self._number = _next_of(_numbered, (self._name, group))
        return self._name if self._number == 1 else f"{self._name}#{self._number}"

    def known_as(self) -> str | None:
        """Return `name`; None before the first exchange in this world."""
        return None if self._number is None else self.name

    def begin_world(self) -> None:
        """Forget the last world's turn and what was under way."""
        self._number = None
        self._turn = 0
        self._pending = None

    def restart(self) -> None:
        """Begin with the first turn again: before a join(), ranks took different numbers."""
        self.end_corrections()
        self._turn = 0

    def end_corrections(self) -> None:
        """Apply what is under way. Not a collective."""
        if self.process_set.process_set_id is None:
            self.drop()  # removed, and with it what was under way
        else:
            self.finish()

    def make_equal_as(self, name: str) -> None:
        """Call make_equal(), whose exchanges have another name."""
        self.settle()
        own = self._name, self._number
        self._name, self._number = name, 1
        try:
            self.average_all()
        finally:
            self._name, self._number = own


_living: list[weakref.ref[Rotation]] = []
_made: Counter[str] = Counter()  # by this process, by name
_numbered: Counter[tuple[str, int | None]] = Counter()  # in this world, by name and process set


def _next_of(counter: Counter[Any], key: Any) -> int:
    counter[key] += 1
    return counter[key]


def _rotations() -> list[Rotation]:
    """Return what is in use, in the order of creation."""
    return [rotation for reference in _living if (rotation := reference()) is not None]


class _Known(NamedTuple):
    """What a rank tells of a rotation. name: None before the first exchange in this world."""

    group: int
    name: str | None
    identity: str


def _living_everywhere() -> dict[str, Rotation]:
    """Return those of this rank that all members of their process sets still have. A collective.

    The keys are equal on all members. Ranks match rotations by their names in this world. Those
    without exchanges in it match if all members' processes made equally many with their name, as
    they have unless some started later; a new process takes over parameters by broadcasts.
    """
    mine = {}
    for rotation in _rotations():
        group = rotation.process_set.process_set_id
        if group is not None and basics.rank() in (basics.group_ranks(group) or []):
            mine[_Known(group, rotation.known_as(), rotation.identity)] = rotation
    lines = control.gather_lines(json.dumps(list(mine)), "rotate.living")
    gathered = [[_Known(*known) for known in json.loads(line)] for line in lines]

    names = [{(known.group, known.name) for known in of_rank} for of_rank in gathered]

    def has_common_name(known: _Known) -> bool:
        members = basics.group_ranks(known.group) or []
        return known.name is not None and all(known[:2] in names[rank] for rank in members)

    others = [
        {(known.group, known.identity) for known in of_rank if not has_common_name(known)}
        for of_rank in gathered
    ]
    found = {}
    for known, rotation in mine.items():
        members = basics.group_ranks(known.group) or []
        if has_common_name(known):
            found[f"rotate.equal.{known.group}.{known.name}"] = rotation
        elif all((known.group, known.identity) in others[rank] for rank in members):
            found[f"rotate.equal.{known.group}.{known.identity}"] = rotation
    return found


def any_living() -> bool:
    """Whether some optimizer of this process averages parameters after its steps."""
    return bool(_rotations())


def synchronize_parameters() -> None:
    """Make the parameters of all optimizers that use `Compression.rotate` equal on all ranks.

    They become the average of all ranks, as do those of `hvd.LocalSGD` and `hvd.DiLoCo`. Call it on
    all ranks of the world before evaluation and checkpoints; a checkpoint that rank 0 alone saves
    without it has rank 0's replica. Broadcasts need no call before them. Elastic commits make it
    themselves, and so does check_host_updates() when hosts have changed.
    """
    if basics.is_initialized() and basics.size() > 1:
        for name, rotation in sorted(_living_everywhere().items()):
            rotation.make_equal_as(name)


def restart_turns() -> None:
    """Let all ranks have the same turn again, once all have joined. Not a collective."""
    for rotation in _rotations():
        rotation.restart()


def finish_corrections() -> None:
    """Apply what is under way, before parameters are overwritten. Not a collective."""
    for rotation in _rotations():
        rotation.end_corrections()


def _begin_world() -> None:
    _numbered.clear()
    for rotation in _rotations():
        rotation.begin_world()


basics.at_init(_begin_world)
