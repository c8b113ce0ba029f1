"""The learning rates by which codecs weigh what they have held back. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch


def learning_rates(optimizer: torch.optim.Optimizer) -> Callable[[list[torch.Tensor]], float]:
    """Return a function that returns the rate of the parameters' next step.

    It returns 0, for a rate that is not known, if the parameters' rates differ, and for optimizers
    whose steps are not proportional to both the rate and the gradient: all but torch.optim.SGD. The
    optimizer may be collected, and may load other rates.
    """
    if not isinstance(optimizer, torch.optim.SGD):
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
