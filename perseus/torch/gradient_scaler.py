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
    called before that; agree_on_overflow(), which step() calls with the tensors, one for each
    device, that tell it whether any gradient was infinite or NaN; and after_scaled_step(), which is
    called after each step of the scaler, whether or not it has called the optimizer's.
    """
    unscale, step = GradScaler.unscale_, GradScaler.step
    check = GradScaler._check_inf_per_device

    @functools.wraps(unscale)
    def average_and_unscale(self: Any, optimizer: Any) -> None:
        # One that is disabled returns at once, but scripts clip gradients after it all the same.
        _call(optimizer, "before_unscaling")
        unscale(self, optimizer)

    @functools.wraps(check)
    def check_and_agree(self: Any, optimizer: Any) -> Any:
        # step() calls it for fused optimizers, which unscale gradients themselves.
        found = check(self, optimizer)
        _call(optimizer, "agree_on_overflow", found.values())
        return found

    @functools.wraps(step)
    def average_and_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():  # else it only calls the optimizer's step, maybe with a closure
            _call(optimizer, "before_unscaling")
            _agree(self, optimizer)
        result = step(self, optimizer, *args, **kwargs)
        _call(optimizer, "after_scaled_step")
        return result

    GradScaler.unscale_, GradScaler.step = average_and_unscale, average_and_step
    GradScaler._check_inf_per_device = check_and_agree


def _agree(scaler: Any, optimizer: Any) -> None:
    """Let the optimizer agree on what unscale_() has found, which the script may have called."""
    if not hasattr(optimizer, "agree_on_overflow"):
        return
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not scaler._found_inf_per_device(optimizer) and not fused:
        scaler.unscale_(optimizer)
    if found := scaler._found_inf_per_device(optimizer):
        optimizer.agree_on_overflow(found.values())


@untraced
def _call(optimizer: Any, method: str, *arguments: Any) -> None:
    function = getattr(optimizer, method, None)
    if function is not None:
        function(*arguments)
