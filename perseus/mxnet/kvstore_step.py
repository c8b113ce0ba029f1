"""Rolls back a KVStore's present step if one of its later keys has a NaN.

A store gets a step key by key, and nothing marks its end, so a step ends when a key is pushed
again. Belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx

from perseus import basics
from perseus.gradients.outcome import Outcome
from perseus.mxnet.kvstore_arguments import Key

Updater = Callable[[Key, Any, Any], None]


class Step:
    """The present step of one store."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._undo: list[Callable[[], None]] = []
        self._pulls: list[Callable[[], None]] = []
        self._is_skipped = False

    def update(
        self, updater: Updater, key: Key, gradient: Any, weight: Any, outcome: Outcome
    ) -> Outcome:
        """Call updater(key, gradient, weight) if the gradient is REDUCED and the step not skipped.

        A SKIPPED gradient skips the step: weights, copies of them that were pulled, and the
        updater's states are restored. The states of an updater that is not MXNet's are not. Returns
        the outcome, which is SKIPPED for all later gradients of a skipped step, too.
        """
        skips = basics.skips_nan_gradients()
        if key in self._keys or not skips:
            self.begin()
        if skips:
            self._keys.add(key)
            if outcome == Outcome.SKIPPED:
                self._skip()
            if self._is_skipped:
                return Outcome.SKIPPED
            if outcome == Outcome.REDUCED:
                self._undo.append(_way_back(updater, key, weight))
        if outcome == Outcome.REDUCED:
            updater(key, gradient, weight)
        return outcome

    def give(self, key: Key, pull: Callable[[], None]) -> None:
        """Call pull(), which copies a key's value to the arrays that asked for it.

        It is called again if the step is skipped later.
        """
        with mx.autograd.pause():
            pull()
        if key in self._keys:
            self._pulls.append(pull)

    def begin(self) -> None:
        """Let the present step end: it cannot be skipped any more."""
        self._keys.clear()
        self._undo.clear()
        self._pulls.clear()
        self._is_skipped = False

    def _skip(self) -> None:
        self._is_skipped = True
        for undo in reversed(self._undo):
            undo()
        for pull in self._pulls:
            pull()
        self._undo.clear()
        self._pulls.clear()


def _way_back(updater: Updater, key: Key, weight: Any) -> Callable[[], None]:
    """Return a function that restores a weight and, for MXNet's own updaters, the key's state and
    the optimizer's numbers."""
    before = weight.copy()
    if not isinstance(updater, mx.optimizer.Updater):
        return lambda: before.copyto(weight)
    optimizer = updater.optimizer
    numbers = {
        name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)
    }
    counts = optimizer._index_update_count
    count = counts.get(key)
    is_new, state = key not in updater.states, _copied(updater.states.get(key))

    def undo() -> None:
        before.copyto(weight)
        vars(optimizer).update(numbers)
        if count is None:
            counts.pop(key, None)
        else:
            counts[key] = count
        if is_new:
            del updater.states[key], updater.states_synced[key]
        else:
            updater.states[key] = state

    return undo


def _copied(state: Any) -> Any:
    if isinstance(state, list | tuple):
        return type(state)(_copied(part) for part in state)
    return state.copy() if isinstance(state, mx.nd.NDArray) else state
