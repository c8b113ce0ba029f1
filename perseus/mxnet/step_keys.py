"""Finds where steps begin for what gets a step key by key. Belongs to the thread that trains."""

from __future__ import annotations

from typing import Any


class StepKeys:
    """The keys of the present step. Nothing marks its end: the next begins when a key occurs again.

    All ranks see the same beginnings if they pass the same keys in every step. is_first: whether
    the present step is the first one, or none has begun.
    """

    def __init__(self) -> None:
        self._keys: set[Any] = set()
        self._last: set[Any] = set()  # those of the step before that have not occurred yet
        self.is_first = True

    def begins(self, key: Any) -> bool:
        """Add a key; return whether a step begins with it."""
        begins = not self._keys or key in self._keys
        if begins:
            self.is_first = not self._keys
            self._last, self._keys = self._keys, set()
        self._keys.add(key)
        self._last.discard(key)
        return begins

    def give_up(self) -> bool:
        """Let the present step end here, and return whether keys of it are still missing.

        Then the next key begins a step, in which all keys of the last whole one are expected.
        """
        is_cut_short = bool(self._last)
        self._keys |= self._last
        self._last = set()
        return is_cut_short

    def is_complete(self) -> bool:
        """Return whether all keys of the step before have occurred, so that no more is expected."""
        return not self.is_first and not self._last
