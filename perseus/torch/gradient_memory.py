"""Recognises gradients whose memory something else uses, too, which are not reduced in place.

Autograd makes a gradient of what backward has computed without copying it if nothing holds that
tensor. Something may hold its memory nevertheless: the gradient of another parameter, or the part
of the backward pass that is still to come.

SharedMemory belongs to the thread that steps the optimizer; hooks may ask it in other threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

_STRIDED = torch.strided
# Counts the holders of a storage; PyTorch's CUDA graphs use it, too. Where a later version lacks
# it, each gradient counts as shared.
_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 1)
_one = torch.empty(1)
_ALONE = _uses(_one.untyped_storage()._cdata) if hasattr(torch._C, "_storage_Use_Count") else 0


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether other tensors have the memory of a dense one; true if that is not known."""
    return tensor.layout == _STRIDED and _uses(tensor.untyped_storage()._cdata) > _ALONE


class SharedMemory:
    """Tells which of an optimizer's gradients cannot be reduced in place.

    A gradient that remains from an earlier step can, if it overlaps no other one: autograd has
    added to it, so backward uses its memory for nothing else. Scripts that keep all gradients in
    one buffer therefore pay for copies in their first step only.
    """

    def __init__(self) -> None:
        self._disjoint: dict[int, weakref.ref[torch.Tensor]] = {}  # by id()
        self._shared: list[torch.Tensor] = []  # those of this step

    def concerns(self, gradient: torch.Tensor) -> bool:
        """Return whether something else may use the memory of a shared gradient in this step."""
        known = self._disjoint.get(id(gradient))
        if known is not None and known() is gradient:
            return False
        self._shared.append(gradient)
        return True

    def end_step(self) -> None:
        """Look at the gradients that were shared in this step, in case they remain."""
        if self._shared:
            known = [known() for known in self._disjoint.values()]
            present = [gradient for gradient in known if gradient is not None]
            disjoint = _disjoint({id(each): each for each in [*present, *self._shared]}.values())
            self._disjoint = {id(each): weakref.ref(each) for each in disjoint}
            self._shared = []


def _disjoint(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors between whose first and last bytes no other one has any."""
    places = sorted((*_extent(tensor), index, tensor) for index, tensor in enumerate(tensors))
    found, reached = [], 0
    for place, (first, end, _, tensor) in enumerate(places):
        follows = places[place + 1][0] if place + 1 < len(places) else end
        if reached <= first and end <= follows:
            found.append(tensor)
        reached = max(reached, end)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in sizes)
    return first, first + (last + 1) * tensor.element_size()
