"""The parameters of an optimizer's groups, which may come and go, and their names.

Libraries for mixed precision, as apex, put master weights in the places of a model's parameters:
copies in a wider dtype. Backward computes the gradients of the model's parameters all the same. The
script copies these to the master weights, which the optimizer steps, and the results back.

Belongs to the thread that steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import is_
from typing import Any, cast

import torch

Groups = list[dict[str, Any]]  # an optimizer's param_groups


class SharedGroups(torch.optim.Optimizer):
    """A wrapped optimizer, whose groups are also those of the optimizer that it was made of.

    Learning rate schedulers that the script has made with that one change them.
    """

    @classmethod
    def made_of(cls, optimizer: torch.optim.Optimizer) -> Any:
        """Return an object with all that the optimizer has, the state included.

        Its class is derived from this one and the optimizer's. Libraries that must not wrap
        optimizers twice look for Horovod's name in its module.
        """
        wrapped = type(optimizer)
        namespace = {"__module__": "perseus.torch.horovod"}
        made_class: Any = type(wrapped.__name__, (cls, wrapped), namespace)
        made = made_class.__new__(made_class)
        made.__dict__.update(optimizer.__dict__)
        # A scheduler has replaced step() by one that is bound to the optimizer, and would warn that
        # this is not called.
        made.__dict__.pop("step", None)
        cast(Any, optimizer)._opt_called = True
        return made

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state into the present groups, which torch would replace."""
        shared = self.param_groups
        super().load_state_dict(*args, **kwargs)
        # Into the list that there is now: optimizers around others give it to these as they load.
        loaded = self.param_groups
        if loaded is shared:
            return
        for place, (group, new) in enumerate(zip(shared, loaded, strict=False)):
            if group is not new:
                group.clear()
                group.update(new)
                loaded[place] = group
        shared[:] = loaded


class Parameters:
    """Tells which parameters an optimizer has, and names them equally on all ranks.

    names: the names of at least the parameters in `groups`, but for master weights; update()
        changes it.
    models: the parameters of the model, by the master weights in their places. of_model() finds
        those that have just come.
    """

    def __init__(self, groups: Groups, names: dict[torch.Tensor, str]) -> None:
        self.names = names
        self.models: dict[torch.Tensor, torch.Tensor] = {}
        self._saw(groups, in_groups(groups))

    def have_changed(self, groups: Groups) -> bool:
        """Return whether any has come, gone or become trainable since the last update()."""
        present = in_groups(groups)
        # Every step asks, of thousands of parameters: this takes 25 ns for each.
        return (
            len(present) != len(self._seen)
            or not all(map(is_, present, self._seen))
            or any(p.requires_grad for p in self._frozen)
        )

    def of_model(self, groups: Groups) -> list[torch.Tensor]:
        """Return those whose gradients backward computes, in the order of their places.

        These are the present ones, but the model's in place of master weights.
        """
        self._find_masters(groups)
        return [self.models.get(p, p) for p in in_groups(groups)]

    def update(self, groups: Groups, forget: bool = True) -> list[torch.Tensor]:
        """Name those that have come, after their places; return of_model().

        forget: whether those that have gone lose their names, which others may then take. The
            model's parameters go with their master weights.
        """
        present = in_groups(groups)
        before = {self.models.get(p, p) for p in self._seen}
        now = self.of_model(groups)
        if forget:
            for parameter in before.difference(now):
                self.names.pop(parameter, None)
        for gone in self.models.keys() - set(present):
            del self.models[gone]
        used = set(self.names.values())
        for parameter, (_, place) in zip(now, placed(groups), strict=True):
            if parameter not in self.names:
                name = self.names[parameter] = _unused(place, used)
                used.add(name)
        self._saw(groups, now)
        return now

    def named(self, groups: Groups) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the present parameters and their names, also of those that have just come.

        Master weights have the names of the model's parameters.
        """
        return ((self.names.get(self.models.get(p, p), name), p) for p, name in placed(groups))

    def _find_masters(self, groups: Groups) -> None:
        """Find which parameters have become master weights of others since the last update().

        All ranks find the same, without communication: those that are new and wider than what was
        at their places.
        """
        present = set(in_groups(groups))
        for group, earlier in zip(groups, self._places, strict=False):
            for new, old in zip(group["params"], earlier, strict=False):
                if (
                    new not in self.names
                    and new not in self.models
                    and old in self.names
                    and old not in present
                    and old.requires_grad
                    and new.shape == old.shape
                    and new.element_size() > old.element_size()
                ):
                    self.models[new] = old

    def _saw(self, groups: Groups, of_model: list[torch.Tensor]) -> None:
        self._seen = in_groups(groups)
        self._places = [list(group["params"]) for group in groups]
        self._frozen = [p for p in of_model if not p.requires_grad]


def in_groups(groups: Groups) -> list[torch.Tensor]:
    """Return the parameters of all groups, in their order."""
    return [p for group in groups for p in group["params"]]


def placed(groups: Groups) -> Iterable[tuple[torch.Tensor, str]]:
    """Yield all parameters with the names that they have if the script gives them none."""
    for i, group in enumerate(groups):
        for j, parameter in enumerate(group["params"]):
            yield parameter, f"allreduce.noname.{i}.{j}"


def _unused(name: str, used: set[str]) -> str:
    """Return the name, with a number if another parameter has it, whose group was elsewhere."""
    numbered = (f"{name}.{number}" for number in count(2))
    while name in used:
        name = next(numbered)
    return name
