"""All ranks' replicas where each step averages an N-th of the parameters, one step late."""

from __future__ import annotations

from collections.abc import Collection

import torch

import perseus.torch.horovod as hvd

# Of rank 2, 1 and 0; with fewer rows than parts, and with more.
SHAPES = {"w": (40, 30), "few": (2, 5), "b": (7,), "scale": ()}
RATE = 0.125


def slope(name: str, rank: int, step: int) -> torch.Tensor:
    """A gradient, in steps of 1/8 as far as half-precision parameters can tell them apart."""
    count = torch.Size(SHAPES[name]).numel()
    numbers = (torch.arange(count) * 7 + rank * 5 + step * 3 + len(name)) % 9 - 4
    return numbers.float().reshape(SHAPES[name]) / 8


class Simulation:
    """The replicas of all ranks, in one process.

    after: turns are taken after steps, as by an optimizer that steps itself; else before them.
    """

    def __init__(self, parts: int, after: bool = True) -> None:
        self.parts = parts
        self.after = after
        self.replicas = [
            {name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(hvd.size())
        ]
        self.pending: list[dict[str, torch.Tensor]] | None = None
        self.taken = 0

    def step(self, skipping: Collection[int] = ()) -> None:
        """skipping: ranks that do not apply their gradients."""
        if not self.after:
            self._take_turn()
        for rank, replica in enumerate(self.replicas):
            for name, value in replica.items() if rank not in skipping else ():
                value.sub_(RATE * slope(name, rank, self.taken))
        if self.after:
            self._take_turn()
        self.taken += 1

    def _take_turn(self) -> None:
        for rank, replica in enumerate(self.replicas):
            for name, value in replica.items():
                if self.pending is not None:
                    value.add_(self.pending[rank][name])
        part = self.taken % self.parts
        self.pending = [
            {name: self._difference(name, value, part) for name, value in replica.items()}
            for replica in self.replicas
        ]

    def _difference(self, name: str, value: torch.Tensor, part: int) -> torch.Tensor:
        mean = torch.stack([replica[name] for replica in self.replicas]).mean(dim=0)
        difference = torch.zeros_like(value)
        rows = value.shape[0] if value.dim() else 1
        begin, end = rows * part // self.parts, rows * (part + 1) // self.parts
        difference.view(rows, -1)[begin:end] = (mean - value).view(rows, -1)[begin:end]
        return difference

    def expect(self, values: list[torch.Tensor], tolerance: float) -> None:
        for value, expected in zip(values, self.replicas[hvd.rank()].values(), strict=True):
            assert (value.double() - expected.double()).abs().max() <= tolerance
