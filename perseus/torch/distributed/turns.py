"""A DistributedDataParallel's parameters, averaged in turn: see perseus.gradients.turns.

Each backward pass whose gradients are applied owes a turn. It is taken after the optimizer's step,
or else at the end of the next pass: the step may be the script's own, and a gradient scaler skips
it on some ranks only. Every rank therefore takes the same turns in the same order, and none waits
for a turn that another rank takes later than its next pass.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from perseus.errors import HorovodInternalError
from perseus.gradients.turns import Turns
from perseus.operations import Kind, ReduceOp
from perseus.torch.distributed.world import World
from perseus.torch.parameter_rows import ParameterRows, average_of


class _Pending(NamedTuple):
    part: int
    sent: torch.Tensor
    handle: int
    dropped: bool = False


class ModelTurns(Turns):
    """parameters: see ParameterRows. number: the model's, the same on all ranks of the world."""

    def __init__(
        self, parameters: list[torch.Tensor], number: int, world: World, parts: int
    ) -> None:
        super().__init__(f"rotate.model {number}", parts)
        self._rows = ParameterRows(parameters, parts)
        self._world = world
        self._owed = False

    def end_pass(self, owes: bool) -> None:
        """Take the turn of the last pass, unless it has been taken; this one may owe another."""
        self.take_owed()
        self._owed = owes

    def take_owed(self) -> None:
        """Take the turn of the last pass, unless it has been taken."""
        if self._owed and not self._world.has_left:
            self._owed = False
            self.take_turn()

    def settle(self) -> None:
        """See Turns."""
        self.take_owed()
        super().settle()

    def drop(self) -> None:
        """See Turns; but wait for what is under way later, because other ranks may still owe it."""
        with contextlib.suppress(HorovodInternalError):  # the world may have ended
            self.take_owed()
        if self._pending is not None:
            self._pending = self._pending._replace(dropped=True)

    def send(self, part: int) -> _Pending | None:
        """See Turns."""
        sent = self._rows.read(part)
        if sent is None:
            return None
        name = f"{self.name}.{part}"
        handle = self._world.operations.submit(
            Kind.ALLREDUCE, name, sent, torch.empty_like(sent), op=ReduceOp.Sum
        )
        return _Pending(part, sent, handle)

    def receive(self, pending: _Pending) -> torch.Tensor:
        """See Turns."""
        return average_of(self._world.operations.synchronize(pending.handle))

    def correct(self, pending: _Pending) -> None:
        """See Turns."""
        average = self.receive(pending)
        if not pending.dropped:
            self._rows.add(pending.part, average.sub_(pending.sent))

    def replace(self, pending: _Pending) -> None:
        """See Turns."""
        self._rows.write(pending.part, self.receive(pending))
