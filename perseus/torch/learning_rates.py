"""The learning rates by which codecs weigh what they have held back. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch


def learning_rates(
    optimizer: torch.optim.Optimizer, kind: type
) -> Callable[[list[torch.Tensor]], float]:
    """Return a function that returns the rate of the parameters' next step.

    kind: the class whose step() is taken. The optimizer's own, which may also be collected, and may
        load other rates, is derived from it.

    It returns 0, for a rate that is not known, if the parameters' rates differ, and if steps are
    not proportional to both the rate and the gradient: those of torch.optim.SGD are, but others may
    not be, even if they are derived from it.
    """
    if kind is not torch.optim.SGD:
        return _unknown
    group_of = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    known = ref(optimizer)

    def rate_of(parameters: list[torch.Tensor]) -> float:
        alive = known()
        if alive is None:
            return 0.0
        groups = alive.param_groups  # which load_state_dict() replaces
        rate = float(groups[group_of[parameters[0]]]["lr"])
        for parameter in parameters[1:]:
            if groups[group_of[parameter]]["lr"] != rate:
                return 0.0
        return rate

    return rate_of


def _unknown(_: list[torch.Tensor]) -> float:
    return 0.0
