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

    It returns 0, for a rate that is not known, if the parameters' rates differ or their group has
    been removed, and if steps are not proportional to both the rate and the gradient: those of
    torch.optim.SGD are, but others may not be, even if they are derived from it.
    """
    if kind is not torch.optim.SGD:
        return _unknown
    # By id, so that parameters live no longer than the optimizer and its callers let them.
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    known = ref(optimizer)

    def rate_of(parameters: list[torch.Tensor]) -> float:
        alive = known()
        if alive is None:
            return 0.0
        groups = alive.param_groups  # which load_state_dict() replaces
        places = {group_of[id(parameter)] for parameter in parameters}
        if max(places) >= len(groups):
            return 0.0
        rates = {float(groups[place]["lr"]) for place in places}
        return rates.pop() if len(rates) == 1 else 0.0

    return rate_of


def _unknown(_: list[torch.Tensor]) -> float:
    return 0.0
