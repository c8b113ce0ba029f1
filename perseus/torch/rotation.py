"""Compression.rotate for torch.optim: see perseus.gradients.rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from perseus.gradients.rotation import Rotation, rows_of
from perseus.process_sets import ProcessSet
from perseus.torch.reductions import allreduce_async
from perseus.torch.session import Sum, synchronize


class _Pending(NamedTuple):
    """sent: the rows of one part, and a 1 at the end, which counts the ranks that take part."""

    part: int
    sent: torch.Tensor
    handle: int


class TorchRotation(Rotation):
    """Averages dense parameters of any floating dtype, as float32 (of float64: float64).

    parameters: those that are trained, in the same order on all ranks. name: matches them across
        ranks.
    """

    def __init__(
        self, parameters: list[torch.Tensor], name: str, process_set: ProcessSet, parts: int
    ) -> None:
        self._parameters = parameters
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if wide else torch.float32
        super().__init__(f"rotate.{name}", process_set, parts)

    def send(self, part: int) -> _Pending | None:
        """See Rotation."""
        views = self._views(part)
        if not views:
            return None
        # A rank that has joined sends zeros.
        one = torch.ones(1, dtype=self._dtype, device=views[0].device)
        sent = torch.cat([*(view.reshape(-1).to(self._dtype) for view in views), one])
        handle = allreduce_async(
            sent, name=f"{self.name}.{part}", op=Sum, process_set=self.process_set
        )
        return _Pending(part, sent, handle)

    def receive(self, pending: _Pending) -> torch.Tensor:
        """See Rotation."""
        total: torch.Tensor = synchronize(pending.handle)
        return total.div_(total[-1].clone())

    def correct(self, pending: _Pending) -> None:
        """See Rotation."""
        difference = self.receive(pending).sub_(pending.sent)
        torch._foreach_add_(*self._pairs(pending.part, difference))

    def replace(self, pending: _Pending) -> None:
        """See Rotation."""
        torch._foreach_copy_(*self._pairs(pending.part, self.receive(pending)))

    def _views(self, part: int) -> list[torch.Tensor]:
        views = []
        for parameter in self._parameters:
            rows = parameter.detach()
            rows = rows.reshape(1) if rows.dim() == 0 else rows
            view = rows[rows_of(rows.shape[0], part, self.parts)]
            if view.numel() > 0:
                views.append(view)
        return views

    def _pairs(
        self, part: int, flat: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the views of a part, and for each its piece of `flat`."""
        views = self._views(part)
        pieces = torch.split(flat[:-1], [view.numel() for view in views])
        return views, [
            piece.view(view.shape).to(view.dtype) for piece, view in zip(pieces, views, strict=True)
        ]
