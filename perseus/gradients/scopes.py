"""Prefixes of reductions' names, which are numbered where several optimizers have the same name.

Belongs to the thread that steps optimizers, or that traces the functions which step them.
"""

from __future__ import annotations

import gc
import weakref
from itertools import count

from perseus import basics
from perseus.process_sets import ProcessSet


class Scope:
    """The prefix of the names of one optimizer's reductions.

    name: may be that of several scopes. Those of one process set are numbered in the order of their
    first use in this world, which is the same on all ranks. The order of creation is not: some
    ranks may create optimizers that no rank uses, such as those of models they inspect, and after
    an elastic restart, old ranks have created more optimizers than new ones.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name
        self._process_set = process_set
        self._number: int | None = None
        self._lasts = False
        _living.add(self)

    def prefix(self) -> str:
        """Return the prefix, which may be another one in the next world."""
        if self._number is None:
            group = self._process_set.process_set_id
            taken = {
                number
                for name, process_set, number in _taken
                if name == self._name and process_set.process_set_id == group
            }
            self._number = next(number for number in count() if number not in taken)
            _taken.append((self._name, self._process_set, self._number))
        return f"{self._name}_{self._number}" if self._number else self._name

    def keep(self) -> None:
        """Keep the prefix in later worlds, because a graph that runs again contains it."""
        self._lasts = True

    def begin_world(self) -> None:
        """Forget the number, unless a graph contains it."""
        if self._lasts and self._number is not None:
            _taken.append((self._name, self._process_set, self._number))
        else:
            self._number = None


_living: weakref.WeakSet[Scope] = weakref.WeakSet()
_taken: list[tuple[str, ProcessSet, int]] = []


def _begin_world() -> None:
    _taken.clear()
    if any(scope._lasts for scope in _living):
        # Functions and models refer to each other; what is not in use must not keep its number,
        # which new ranks give to what they use.
        gc.collect()
    for scope in list(_living):
        scope.begin_world()


basics.at_init(_begin_world)
