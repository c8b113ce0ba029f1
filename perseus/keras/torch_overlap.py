"""Keras on PyTorch: begins to reduce gradients while backward is still running.

Belongs to the thread that trains. Hooks run in it as well, because tensors are in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from perseus.gradients.handle_reducer import Reduction
from perseus.torch.hooks import on_gradient
from perseus.torch.session import synchronize

_TWICE = (
    "[keras] the gradient of {} came twice between scale_loss() and apply(): call backward once, "
    "or leave scale_loss() out, which Keras' own train_step calls in front of it"
)


_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """See Backend. torch.compile would trace into the core and break its graph at every call."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Begun:
    gradient: torch.Tensor
    version: int  # PyTorch's version counter of the gradient when it was copied
    reduction: Reduction  # of a copy, because the script may still change p.grad


class Overlap:
    """Begins reductions in hooks of parameters, during a backward pass that was announced.

    Changes of a gradient are recognised by PyTorch's version counter, for which writes through
    `.data` do not count. Values are not compared: all ranks must decide alike whether to reduce a
    gradient again, and a change, such as clipping, may leave the values of some ranks as they were.

    begin: a bound method of an object that outlives this one. begin(name, gradients) begins to
        reduce gradients in place.
    """

    def __init__(self, begin: Callable[[str, list[torch.Tensor]], Reduction]) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._announced = self._watches = False
        self._begun: dict[str, _Begun] = {}

    def announce(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Announce that backward() is next, followed by take() for each of its gradients.

        parameters: the same in every call. names: one for each parameter.

        Waits for reductions of an earlier announced backward() whose results were not taken.
        """
        for name in list(self._begun):
            self._finish(name)
        if not self._watches:
            for parameter, name in zip(parameters, names, strict=True):
                if parameter.requires_grad and parameter.is_leaf:
                    on_gradient(parameter, self, Overlap._on_gradient, name, in_place=False)
        self._watches = self._announced = True

    def take(self, name: str, gradient: torch.Tensor, reducible: list[torch.Tensor]) -> Reduction:
        """Return the reduction that has begun for a gradient.

        Begins to reduce `reducible`, in place, if none has, or if the script has changed or
        replaced the gradient since, but not through `.data`. The latter has a name of its own: if
        it happens on some ranks only, it must not meet the others' next gradient.
        """
        self._announced = False
        begin, begun = self._begin(), self._begun.get(name)
        assert begin is not None
        if begun is None:
            return begin(name, reducible)
        same = begun.gradient.data_ptr() == gradient.data_ptr()
        if not same or begun.gradient._version != begun.version:
            self._finish(name)
            return begin(f"{name}/changed", reducible)
        del self._begun[name]
        return begun.reduction

    def forget(self) -> None:
        """Drop reductions without waiting, because their world has ended."""
        self._announced = False
        self._begun.clear()

    def _finish(self, name: str) -> None:
        synchronize(self._begun.pop(name).reduction.handle)

    @uncompiled
    def _on_gradient(self, parameter: torch.Tensor, name: str, last: bool) -> None:
        if not self._announced or not last:
            return
        begin, gradient = self._begin(), parameter.grad
        if begin is None or gradient is None or gradient.layout != torch.strided:
            return
        if name in self._begun:
            raise RuntimeError(_TWICE.format(name))
        copy = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._begun[name] = _Begun(gradient, gradient._version, begin(name, [copy]))
