"""What lossy codecs hold back in the wrapper around a module, from one wrapper to the next.

A DistributedDataParallel ends with its process group, and an elastic job makes both anew in every
world. Belongs to the thread that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from perseus.errors import HorovodInternalError
from perseus.gradients.residuals import Held, Source


class WrapperResiduals:
    """The residuals of a module's gradients: in its wrapper, or until the next one is made, here.

    kept: whether an elastic state has the module; others' residuals end with the wrapper.
    """

    def __init__(self) -> None:
        self.kept = False
        self._wrapper: Source | None = None
        self._world: object = None  # of the wrapper's process group
        self._waiting: dict[str, Held] = {}

    def begin(self, wrapper: Source, world: object) -> None:
        """A wrapper has been made: it takes what waits, or what the last one holds."""
        held = self.residuals() if self.kept else {}
        if self._wrapper is not None and held:
            self._wrapper.go_on_with({})
        self._wrapper, self._world, self._waiting = wrapper, world, {}
        if held:
            wrapper.go_on_with(held)

    def end(self, world: object) -> None:
        """The world is about to end. What the wrapper there holds waits for the next one."""
        if self._wrapper is None or self._world is not world:
            return
        wrapper, self._wrapper, self._world = self._wrapper, None, None
        if self.kept:
            with contextlib.suppress(HorovodInternalError):  # of a process that was forked
                self._waiting = wrapper.residuals()

    def residuals(self) -> dict[str, Held]:
        """Return copies of all residuals, by the parameters' names."""
        return dict(self._waiting) if self._wrapper is None else self._wrapper.residuals()

    def go_on_with(self, residuals: Mapping[str, Held]) -> None:
        """Replace all residuals by a result of residuals()."""
        if self._wrapper is None:
            self._waiting = dict(residuals)
        else:
            self._wrapper.go_on_with(residuals)


_by_module: WeakKeyDictionary[torch.nn.Module, WrapperResiduals] = WeakKeyDictionary()


def wrapper_residuals(module: torch.nn.Module) -> WrapperResiduals:
    """Return those of a module, for as long as it lives."""
    return _by_module.setdefault(module, WrapperResiduals())
