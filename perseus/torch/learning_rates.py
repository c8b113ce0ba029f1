"""What codecs know of the steps that apply gradients: rates and momenta. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch

_UNKNOWN = (0.0, 0.0)
_NONE: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})


def steps_of(
    optimizer: torch.optim.Optimizer,
    kind: type,
    models: Mapping[torch.Tensor, torch.Tensor] = _NONE,
) -> Callable[[list[torch.Tensor]], tuple[float, float]]:
    """Return a function that returns the rate and the momentum of the parameters' next step.

    kind: the class whose step() is taken. The optimizer's own, which may also be collected, and may
        load other rates, is derived from it.
    models: see Parameters. The steps of the model's parameters are those of their master weights.

    It returns 0 for what is not known: if the parameters' rates or momenta differ or their group
    has been removed, and if steps are not proportional to both the rate and the gradient. Those of
    torch.optim.SGD are, but others may not be, even if they are derived from it. The momentum is 0
    as well if it is not the one of perseus_request: of Nesterov's kind, or dampened.
    """
    if kind is not torch.optim.SGD:
        return _unknown
    group_of = _places(optimizer, models)
    known = ref(optimizer)

    def step_of(parameters: list[torch.Tensor]) -> tuple[float, float]:
        alive = known()
        if alive is None:
            return _UNKNOWN
        groups = alive.param_groups
        try:
            places = {group_of[id(parameter)] for parameter in parameters}
        except KeyError:  # one has joined since, or gone
            group_of.update(_places(alive, models))
            places = {group_of.get(id(parameter), len(groups)) for parameter in parameters}
        if max(places) >= len(groups):
            return _UNKNOWN
        if len(places) == 1:
            group = groups[places.pop()]
            return float(group["lr"]), _momentum(group)
        rates = {float(groups[place]["lr"]) for place in places}
        momenta = {_momentum(groups[place]) for place in places}
        return (
            rates.pop() if len(rates) == 1 else 0.0,
            momenta.pop() if len(momenta) == 1 else 0.0,
        )

    return step_of


def _places(
    optimizer: torch.optim.Optimizer, models: Mapping[torch.Tensor, torch.Tensor]
) -> dict[int, int]:
    """The groups of parameters, by id, so that the optimizer and callers let these end."""
    return {
        id(models.get(parameter, parameter)): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def learning_rates(
    optimizer: torch.optim.Optimizer, kind: type
) -> Callable[[list[torch.Tensor]], float]:
    """Return a function that returns the rate alone; see steps_of()."""
    step_of = steps_of(optimizer, kind)
    return lambda parameters: step_of(parameters)[0]


def _momentum(group: dict[str, Any]) -> float:
    return 0.0 if group["nesterov"] or group["dampening"] != 0 else float(group["momentum"])


def _unknown(_: list[torch.Tensor]) -> tuple[float, float]:
    return _UNKNOWN
