"""Lets a GradScaler divide gradients only once they are averaged.

Stateless, but for the method of torch.amp.GradScaler that it replaces.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# Before torch 2.3 it is only there. What is there now is derived from the former.
GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_METHOD = "_unscale_grads_"


@functools.cache
def let_scalers_wait() -> None:
    """Let scalers call an optimizer's before_unscaling(), if it has one, before they read p.grad.

    They read it in unscale_() and step(), which therefore work as with DistributedDataParallel. A
    scaler that has no such method is left alone: the reducer notices what it does to gradients.
    """
    unscale = getattr(GradScaler, _METHOD, None)
    if unscale is None:
        return

    @functools.wraps(unscale)
    def average_and_unscale(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if (before := getattr(optimizer, "before_unscaling", None)) is not None:
            before()
        return unscale(self, optimizer, *args, **kwargs)

    setattr(GradScaler, _METHOD, average_and_unscale)
