"""What lossy codecs hold back in the wrapper around a module, from one wrapper to the next.

A DistributedDataParallel ends with its process group, and an elastic job makes both anew in every
world. Belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from perseus.gradients.residuals import Held, Source


class WrapperResiduals:
    """The residuals of a module's gradients: in its wrapper, or until the next one is made, here.

    kept: whether an elastic state has the module; others' residuals end with the wrapper.
    """

    def __init__(self) -> None:
        self.kept = False
        self._wrapper: Source | None = None
        self._waiting: dict[str, Held] = {}

    def begin(self, wrapper: Source) -> None:
        """A wrapper has been made: it takes what waits."""
        self._wrapper = wrapper
        if self._waiting:
            wrapper.go_on_with(self._waiting)
        self._waiting = {}

    def end(self, wrapper: Source) -> None:
        """The wrapper's process group is about to end: what it holds waits for the next one."""
        if self._wrapper is wrapper:
            self._waiting = wrapper.residuals() if self.kept else {}
            self._wrapper = None

    def residuals(self) -> dict[str, Held]:
        """Return copies of all residuals, by the parameters' names."""
        return dict(self._waiting) if self._wrapper is None else self._wrapper.residuals()

    def go_on_with(self, residuals: Mapping[str, Held]) -> None:
        """Replace all residuals by a result of residuals()."""
        if self._wrapper is None:
            self._waiting = dict(residuals)
        else:
            self._wrapper.go_on_with(residuals)


_of: WeakKeyDictionary[torch.nn.Module, WrapperResiduals] = WeakKeyDictionary()


def wrapper_residuals(module: torch.nn.Module) -> WrapperResiduals:
    """Return those of a module, for as long as it lives."""
    return _of.setdefault(module, WrapperResiduals())
