"""Keras on PyTorch: reductions of gradients that begin while backward is still running.

Belongs to the thread that trains; hooks run in it, too, as tensors lie in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perseus import basics
from perseus.torch.session import synchronize

_TWICE = (
    "[keras] the gradient of {} came twice between scale_loss() and apply(): call backward once, "
    "or leave scale_loss() out, which Keras' own train_step calls in front of it"
)


@dataclass(frozen=True)
class _Begun:
    gradient: torch.Tensor
    version: int  # of the gradient's content, as PyTorch counts
    # Reduced in place: the script may still do with p.grad what it likes.
    copy: torch.Tensor
    handle: int


class Overlap:
    """Starts reductions from hooks of parameters, in the one backward that was announced.

    start: of an object that outlives this one; given a gradient's name and the tensor as a tuple,
    it begins to reduce it in place and returns a handle.
    """

    def __init__(self, start: Callable[[str, tuple[torch.Tensor, ...]], int]) -> None:
        self._start = weakref.WeakMethod(start)
        self._announced = self._watches = False
        self._begun: dict[str, _Begun] = {}
        _living.add(self)

    def announce(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Backward is next, and then take() of all that it gives. Parameters are always the same.

        Waits for reductions that an announced backward has begun and no step has used.
        """
        for name in list(self._begun):
            self._finish(name)
        if not self._watches:
            for parameter, name in zip(parameters, names, strict=True):
                if parameter.requires_grad and parameter.is_leaf:
                    self._watch(parameter, name)
        self._watches = self._announced = True

    def take(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """Where the reduction of a gradient will be, and its handle, if it has begun.

        Not if the script has changed the gradient since, or made another one of it.
        """
        self._announced = False
        begun = self._begun.get(name)
        if begun is None:
            return None
        same = begun.gradient.data_ptr() == gradient.data_ptr()
        if not same or begun.gradient._version != begun.version:
            self._finish(name)
            return None
        del self._begun[name]
        return begun.copy, begun.handle

    def forget(self) -> None:
        """Drop what has begun without waiting: it belongs to a world that is gone."""
        self._announced = False
        self._begun.clear()

    def _finish(self, name: str) -> None:
        synchronize(self._begun.pop(name).handle)

    def _watch(self, parameter: torch.Tensor, name: str) -> None:
        """Set a hook that does not keep this alive: models outlive their optimizers."""
        reference = weakref.ref(self)

        def hook(watched: torch.Tensor) -> None:
            living = reference()
            if living is not None and living._announced:
                living._on_gradient(watched, name)

        registration = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        weakref.finalize(self, registration.remove).atexit = False

    def _on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        start, gradient = self._start(), parameter.grad
        if start is None or gradient is None or gradient.layout != torch.strided:
            return
        if name in self._begun:
            raise RuntimeError(_TWICE.format(name))
        copy = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._begun[name] = _Begun(gradient, gradient._version, copy, start(name, (copy,)))


_living: weakref.WeakSet[Overlap] = weakref.WeakSet()


def _begin_world() -> None:
    # Handles are numbered anew in every world.
    for overlap in _living:
        overlap.forget()


basics.at_init(_begin_world)
