"""The parameters of an optimizer's groups, which may come and go, and their names.

Belongs to the thread that steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import is_
from typing import Any

import torch

Groups = list[dict[str, Any]]  # an optimizer's param_groups, which load_state_dict() replaces


class Parameters:
    """Tells which parameters an optimizer has, and names them equally on all ranks.

    names: the names of at least the parameters in `groups`; update() changes it.
    """

    def __init__(self, groups: Groups, names: dict[torch.Tensor, str]) -> None:
        self.names = names
        self._saw(in_groups(groups))

    def have_changed(self, groups: Groups) -> bool:
        """Return whether any has come, gone or become trainable since the last update()."""
        present = in_groups(groups)
        # Every step asks, of thousands of parameters: this takes 25 ns for each.
        return (
            len(present) != len(self._seen)
            or not all(map(is_, present, self._seen))
            or any(p.requires_grad for p in self._frozen)
        )

    def update(self, groups: Groups, forget: bool = True) -> list[torch.Tensor]:
        """Name those that have come, after their places; return all that there are now.

        forget: whether those that have gone lose their names, which others may then take.
        """
        present = in_groups(groups)
        if forget:
            for parameter in set(self._seen).difference(present):
                self.names.pop(parameter, None)
        used = set(self.names.values())
        for parameter, place in placed(groups):
            if parameter not in self.names:
                name = self.names[parameter] = _unused(place, used)
                used.add(name)
        self._saw(present)
        return present

    def named(self, groups: Groups) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the present parameters and their names, also of those that have just come."""
        return ((self.names.get(p, name), p) for p, name in placed(groups))

    def _saw(self, present: list[torch.Tensor]) -> None:
        self._seen = present
        self._frozen = [p for p in present if not p.requires_grad]


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
