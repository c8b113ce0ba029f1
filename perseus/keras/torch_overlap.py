"""Keras on PyTorch: reductions of gradients that begin while backward is still running.

Belongs to the thread that trains; hooks run in it, too, as tensors lie in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perseus.gradients.handle_reducer import Reduction
from perseus.torch.hooks import on_gradient
from perseus.torch.session import synchronize

_TWICE = (
    "[keras] the gradient of {} came twice between scale_loss() and apply(): call backward once, "
    "or leave scale_loss() out, which Keras' own train_step calls in front of it"
)


@dataclass(frozen=True)
class _Begun:
    gradient: torch.Tensor
    version: int  # of the gradient's content, as PyTorch counts
    reduction: Reduction  # of a copy: the script may still do with p.grad what it likes


class Overlap:
    """Starts reductions from hooks of parameters, in the one backward that was announced.

    begin: of an object that outlives this one; given a gradient's name and the tensor in a list,
    it begins to reduce it in place.
    """

    def __init__(self, begin: Callable[[str, list[torch.Tensor]], Reduction]) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._announced = self._watches = False
        self._begun: dict[str, _Begun] = {}

    def announce(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Backward is next, and then take() of all that it gives. Parameters are always the same.

        Waits for reductions that an announced backward has begun and no step has used.
        """
        for name in list(self._begun):
            self._finish(name)
        if not self._watches:
            for parameter, name in zip(parameters, names, strict=True):
                if parameter.requires_grad and parameter.is_leaf:
                    on_gradient(parameter, self, Overlap._on_gradient, name)
        self._watches = self._announced = True

    def take(self, name: str, gradient: torch.Tensor) -> Reduction | None:
        """The reduction of a gradient, if it has begun.

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
        return begun.reduction

    def forget(self) -> None:
        """Drop what has begun without waiting: it belongs to a world that is gone."""
        self._announced = False
        self._begun.clear()

    def _finish(self, name: str) -> None:
        synchronize(self._begun.pop(name).reduction.handle)

    def _on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        if not self._announced:
            return
        begin, gradient = self._begin(), parameter.grad
        if begin is None or gradient is None or gradient.layout != torch.strided:
            return
        if name in self._begun:
            raise RuntimeError(_TWICE.format(name))
        copy = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._begun[name] = _Begun(gradient, gradient._version, begin(name, [copy]))
