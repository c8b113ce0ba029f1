"""A training with local steps, whose gradients differ between ranks, and its comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from patterns import world_with
from torch import nn
from turns import RATE, SHAPES, slope

import perseus.torch.horovod as hvd

Wrap = Callable[..., torch.optim.Optimizer]


def apart(**settings: object) -> AbstractContextManager[None]:
    """Every rank is a host of its own."""
    return world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=1, **settings)


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


def same(values: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 0) -> None:
    for value, wanted in zip(values, expected, strict=True):
        difference = (value.double() - wanted.double()).abs().max()
        assert difference <= tolerance, f"{difference} instead of at most {tolerance}"


def rounding() -> float:
    """How far results are from a simulation: averages of 2 and 4 ranks are exact."""
    return 1e-5 if hvd.size() == 3 else 0


def global_parameters(training: Training) -> list[torch.Tensor]:
    return training.optimizer.state_dict()["perseus_local_steps"]["global"]


def kinds() -> Iterator[tuple[Wrap, dict[str, object]]]:
    yield hvd.LocalSGD, {"every": 3}
    yield hvd.LocalSGD, {"every": 4, "delay": 4}
    yield hvd.LocalSGD, {"every": 5, "delay": 0}
    yield hvd.DiLoCo, {"every": 4, "delay": 4}
    yield hvd.DiLoCo, {"every": 4, "fragments": 4, "delay": 3}
    yield hvd.DiLoCo, {"every": 5, "fragments": 2, "delay": 0, "compression": hvd.Compression.fp16}
