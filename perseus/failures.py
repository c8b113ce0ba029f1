"""Failures of operations that are waited for together: the first is raised, none is lost.

Objects of one thread.
"""

from __future__ import annotations

_MOST = 16  # others that are told beside the first


class Failures:
    """Collects exceptions while the remaining operations are waited for."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, error: Exception) -> None:
        """Keep it, unless one that says the same is there: a world's end fails everything alike."""
        if all(str(known) != str(error) for known in self._errors):
            self._errors.append(error)

    def raise_first(self) -> None:
        """Raise the first, whose traceback tells the others; do nothing if there is no failure."""
        if not self._errors:
            return
        first, *others = self._errors
        for error in others[:_MOST]:
            _note(first, f"It was not the only failure: {type(error).__name__}: {error}")
        if len(others) > _MOST:
            _note(first, f"{len(others) - _MOST} more failures are not shown.")
        raise first


def _note(error: Exception, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        error.args = (f"{error}\n{text}",)
