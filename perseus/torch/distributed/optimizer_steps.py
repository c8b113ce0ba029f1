"""Watches the steps of torch's optimizers, for the models whose parameters they hold.

torch calls one hook after each step of any optimizer. It is there from the first model on, and
keeps neither models nor optimizers alive. Belongs to the thread that trains; autograd's threads
read rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from perseus.torch.learning_rates import learning_rates


class _Known:
    """An optimizer that has stepped. held: the ids of the model's parameters that it holds."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[tuple[int, int]],
        parameters: frozenset[int],
    ) -> None:
        self._optimizer = ref(optimizer)
        self._groups = groups
        self.held = parameters.intersection(
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        self.rate_of = learning_rates(optimizer, type(optimizer))

    def is_alive(self) -> bool:
        """Whether anybody can step it."""
        return self._optimizer() is not None

    def is_still(self, optimizer: torch.optim.Optimizer, groups: list[tuple[int, int]]) -> bool:
        """Whether this is that optimizer, with the parameters that it had."""
        return self._optimizer() is optimizer and self._groups == groups


def _groups_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """What shows that parameters have been added or removed, without a look at each of them."""
    lists = [group["params"] for group in optimizer.param_groups]
    return [(len(each), id(each[0]) if each else 0) for each in lists]


class OptimizerSteps:
    """The steps of all optimizers that hold some of a model's parameters.

    parameters: the model's, which live as long as this does. all_taken: called after a step if all
        optimizers have stepped whose steps this pass is expected to have: those that hold what was
        stepped after the last pass, or at first all parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], all_taken: Callable[[], None]) -> None:
        self._parameters = frozenset(map(id, parameters))
        self._all_taken = all_taken
        self._known: dict[int, _Known] = {}  # by the optimizer's id
        self._holders: dict[int, list[_Known]] = {}  # by the parameter's id
        self._expected = self._parameters
        self._stepped: frozenset[int] = frozenset()
        _living[next(_numbers)] = self
        _watch()

    def rate_of(self, parameter: torch.Tensor) -> float:
        """Return the learning rate of a parameter's next step; 0 if it is not known.

        It is known from the first step of the only optimizer that holds the parameter on; see
        learning_rates(). Ranks may know different rates: they weigh what a rank itself holds back,
        and do not affect what others make of the bytes that it sends.
        """
        alive = [known for known in self._holders.get(id(parameter), ()) if known.is_alive()]
        return alive[0].rate_of([parameter]) if len(alive) == 1 else 0.0

    def begin_step(self) -> None:
        """Expect the steps that apply what a backward pass has computed."""
        self._expected = self._stepped or self._expected
        self._stepped = frozenset()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step that has been taken."""
        known = self._known.get(id(optimizer))
        groups = _groups_of(optimizer)
        if known is None or not known.is_still(optimizer, groups):
            known = self._learn(optimizer, groups)
        if known.held:
            self._stepped |= known.held
            if self._expected <= self._stepped:
                self._all_taken()

    def _learn(self, optimizer: torch.optim.Optimizer, groups: list[tuple[int, int]]) -> _Known:
        self._known[id(optimizer)] = learned = _Known(optimizer, groups, self._parameters)
        self._known = {key: known for key, known in self._known.items() if known.is_alive()}
        self._holders = {}
        for known in self._known.values():
            for parameter in known.held:
                self._holders.setdefault(parameter, []).append(known)
        return learned


# In the order in which they were made, which is the same on all ranks.
_living: WeakValueDictionary[int, OptimizerSteps] = WeakValueDictionary()
_numbers = count()


@cache
def _watch() -> None:
    # A graph that torch.compile makes of a step ends before the hook.
    hook = torch.compiler.disable(_after_step)  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(hook)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for steps in list(_living.values()):
        steps.add(optimizer)
