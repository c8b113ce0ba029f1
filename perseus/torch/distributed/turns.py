"""A DistributedDataParallel's parameters, averaged in turn: see perseus.gradients.turns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from perseus.gradients.turns import Turns
from perseus.operations import Kind, ReduceOp
from perseus.torch.distributed.world import World
from perseus.torch.parameter_rows import ParameterRows, average_of


class _Pending(NamedTuple):
    part: int
    sent: torch.Tensor
    handle: int


class ModelTurns(Turns):
    """parameters: see ParameterRows. number: the model's, the same on all ranks of the world."""

    def __init__(
        self, parameters: list[torch.Tensor], number: int, world: World, parts: int
    ) -> None:
        super().__init__(f"rotate.model {number}", parts)
        self._rows = ParameterRows(parameters, parts)
        self._world = world

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
        self._rows.add(pending.part, self.receive(pending).sub_(pending.sent))

    def replace(self, pending: _Pending) -> None:
        """See Turns."""
        self._rows.write(pending.part, self.receive(pending))
