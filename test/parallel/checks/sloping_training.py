"""A training with an optimizer of hvd, whose gradients differ between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from turns import RATE, SHAPES, slope

import perseus.torch.horovod as hvd

Wrap = Callable[..., torch.optim.Optimizer]


class Training:
    def __init__(
        self,
        wrap: Wrap,
        dtype: torch.dtype = torch.float32,
        inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **options: object,
    ) -> None:
        self.parameters = {
            name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()
        }
        made = inner(self.parameters.values(), lr=RATE)
        self.optimizer = wrap(made, named_parameters=self.parameters.items(), **options)
        self.taken = 0

    def compute(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for name, parameter in self.parameters.items():
            numbers = slope(name, hvd.rank(), self.taken).to(parameter.dtype) * factor
            (parameter * numbers).sum().backward()
        self.taken += 1

    def step(self) -> None:
        self.compute()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters.values()]

    def equal_everywhere(self) -> bool:
        return equal_everywhere(self.values())

    def saved(self) -> dict[str, object]:
        return copy.deepcopy({"model": self.parameters, "optimizer": self.optimizer.state_dict()})

    def load(self, saved: dict[str, object]) -> None:
        for parameter, value in zip(self.values(), saved["model"].values(), strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])


def equal_everywhere(values: list[torch.Tensor]) -> bool:
    flat = torch.cat([value.reshape(-1) for value in values])
    gathered = hvd.allgather(flat.view(torch.uint8).reshape(1, -1))
    return all(torch.equal(row, gathered[0]) for row in gathered)
