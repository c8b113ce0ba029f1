"""Lets a GradScaler work with optimizers of several ranks.

It divides gradients only once they are averaged, and may let all ranks leave out a step together.

Stateless, but for the methods of torch.amp.GradScaler that it replaces.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from perseus.torch.untraced import untraced

# Before torch 2.3 it is only there. What is there now is derived from the former.
GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


@functools.cache
def let_scalers_wait() -> None:
    """Let the scalers of this process average a wrapped optimizer's gradients before they read any.

    They read p.grad in unscale_() and step(). Optimizers may have before_unscaling(), which is
    called before that; after_unscaling(), which is called after it with the tensors, one for each
    device, that tell whether any gradient was infinite or NaN; and after_scaled_step(), which is
    called after each step of the scaler, whether or not it has called the optimizer's.
    """
    unscale, step = GradScaler.unscale_, GradScaler.step

    @functools.wraps(unscale)
    def average_and_unscale(self: Any, optimizer: Any) -> None:
        # One that is disabled returns at once, but scripts clip gradients after it all the same.
        _call(optimizer, "before_unscaling")
        unscale(self, optimizer)
        if self.is_enabled():
            # All that the scaler's step looks at.
            _call(optimizer, "after_unscaling", self._found_inf_per_device(optimizer).values())

    @functools.wraps(step)
    def average_and_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():  # else it only calls the optimizer's step, maybe with a closure
            _call(optimizer, "before_unscaling")
        result = step(self, optimizer, *args, **kwargs)
        _call(optimizer, "after_scaled_step")
        return result

    GradScaler.unscale_, GradScaler.step = average_and_unscale, average_and_step


@untraced
def _call(optimizer: Any, method: str, *arguments: Any) -> None:
    function = getattr(optimizer, method, None)
    if function is not None:
        function(*arguments)
