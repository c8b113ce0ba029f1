"""Remembers which reduced gradients may be applied, between the two calls of an optimizer's step.

Belongs to the thread that applies gradients, or that traces the function which applies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from perseus.tensorflow.modes import belongs_here, vars_to_refs

_Pairs = Iterable[tuple[Any, Any]]


class Verdicts:
    """Verdicts on gradients of several sets of variables, which may be computed before they are
    applied. One is a scalar bool tensor, or None if gradients may always be applied.

    last: the one that was given last.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self._on_sets: dict[frozenset[Any], Any] = {}
        self._asked: set[frozenset[Any]] = set()  # of these
        self._on_each: dict[Any, Any] = {}

    def give(self, grads_and_vars: _Pairs, verdict: Any) -> None:
        """Remember the verdict on these gradients."""
        self.last = verdict
        if verdict is None and not self._on_sets:
            return
        given = _references(grads_and_vars)
        # Sets that were applied since may now be parts of this one.
        for older in [each for each in self._asked if each <= set(given)]:
            self._asked.remove(older)
            del self._on_sets[older]
        self._on_sets[frozenset(given)] = verdict
        self._on_each.update(dict.fromkeys(given, verdict))

    def on(self, grads_and_vars: _Pairs) -> Any:
        """Return the verdict on the gradients of these variables.

        Of gradients that were not computed together, all verdicts must agree. The last verdict
        counts for variables of which no gradients were computed.
        """
        given = _references(grads_and_vars)
        if (whole := frozenset(given)) in self._on_sets:
            verdicts = [self._on_sets[whole]]
            self._asked.add(whole)
        else:
            verdicts = [self._on_each[v] for v in given if v in self._on_each] or [self.last]
        here = {id(v): v for v in verdicts if v is not None and belongs_here(v)}
        return (
            tf.reduce_all(list(here.values())) if len(here) > 1 else next(iter(here.values()), None)
        )


def _references(grads_and_vars: _Pairs) -> tuple[Any, ...]:
    references: tuple[Any, ...] = vars_to_refs([v for g, v in grads_and_vars if g is not None])
    return references
