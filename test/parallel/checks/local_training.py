"""What the checks of local steps have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sloping_training import Training, Wrap

import perseus.torch.horovod as hvd


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
