"""The parts of torch parameters that ranks average in turn: see perseus.gradients.turns."""

from __future__ import annotations

import torch

from perseus.gradients.turns import rows_of


class ParameterRows:
    """Dense parameters, whose parts travel as float32, or as float64 if some are that wide.

    Complex parameters are pairs of numbers.

    parameters: those that are trained, in the same order on all ranks. parts: how many there are.

    A flat tensor has the rows of one part of all parameters, and a 1 at its end: in a sum over
    ranks that counts those that take part, as one that has joined sends zeros. Raises ValueError
    unless all parameters are on one device.
    """

    def __init__(self, parameters: list[torch.Tensor], parts: int) -> None:
        self._parameters = parameters
        self._parts = parts
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            raise ValueError(
                "[torch] ranks average parameters in one flat tensor, so all must be on one "
                f"device, but they are on {', '.join(sorted(map(str, devices)))}: use "
                "DistributedOptimizer with a compression other than rotate"
            )
        wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        self._dtype = torch.float64 if wide else torch.float32

    def read(self, part: int) -> torch.Tensor | None:
        """Return a flat copy of a part; None if it has no elements."""
        views = self._views(part)
        if not views:
            return None
        one = torch.ones(1, dtype=self._dtype, device=views[0].device)
        return torch.cat([*(view.reshape(-1).to(self._dtype) for view in views), one])

    def add(self, part: int, flat: torch.Tensor) -> None:
        """Add to a part; the last element has no meaning."""
        torch._foreach_add_(*self._pairs(part, flat))

    def write(self, part: int, flat: torch.Tensor) -> None:
        """Replace a part; the last element has no meaning."""
        torch._foreach_copy_(*self._pairs(part, flat))

    def _views(self, part: int) -> list[torch.Tensor]:
        views = []
        for parameter in self._parameters:
            rows = parameter.detach()
            if rows.is_complex():
                rows = torch.view_as_real(rows)  # else only the real parts would travel
            rows = rows.reshape(1) if rows.dim() == 0 else rows
            view = rows[rows_of(rows.shape[0], part, self._parts)]
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


def average_of(total: torch.Tensor) -> torch.Tensor:
    """Divide the sum of flat tensors by the ranks that took part, in place; return it."""
    return total.div_(total[-1].clone())
