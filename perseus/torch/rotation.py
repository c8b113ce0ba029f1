"""Compression.rotate for torch.optim: see perseus.gradients.turns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from perseus.gradients.rotation import Rotation
from perseus.process_sets import ProcessSet
from perseus.torch.parameter_rows import ParameterRows, average_of
from perseus.torch.reductions import allreduce_async
from perseus.torch.session import Sum, synchronize


class _Pending(NamedTuple):
    part: int
    sent: torch.Tensor
    handle: int


class TorchRotation(Rotation):
    """parameters: see ParameterRows. name: matches them across ranks."""

    def __init__(
        self, parameters: list[torch.Tensor], name: str, process_set: ProcessSet, parts: int
    ) -> None:
        self._rows = ParameterRows(parameters, parts)
        super().__init__(f"rotate.{name}", process_set, parts)

    def send(self, part: int) -> _Pending | None:
        """See Turns."""
        sent = self._rows.read(part)
        if sent is None:
            return None
        handle = allreduce_async(
            sent, name=f"{self.name}.{part}", op=Sum, process_set=self.process_set
        )
        return _Pending(part, sent, handle)

    def receive(self, pending: _Pending) -> torch.Tensor:
        """See Turns."""
        return average_of(synchronize(pending.handle))

    def correct(self, pending: _Pending) -> None:
        """See Turns."""
        self._rows.add(pending.part, self.receive(pending).sub_(pending.sent))

    def replace(self, pending: _Pending) -> None:
        """See Turns."""
        self._rows.write(pending.part, self.receive(pending))
