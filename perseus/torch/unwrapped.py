"""Warns if ranks start from equal parameters but train without averaging gradients.

That happens if the script does not wrap its optimizer in DistributedOptimizer: an ordinary
optimizer takes two steps after a broadcast, and this rank finishes no operation between them.
Belongs to the thread that trains.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from perseus import basics

_WARNING = (
    "[torch] an optimizer takes steps without averaging gradients over the ranks, which therefore "
    "train models of their own: wrap it, optimizer = hvd.DistributedOptimizer(optimizer, "
    "named_parameters=model.named_parameters())"
)


class _Watch:
    """Watches the first two steps after a broadcast; another broadcast restarts it."""

    def __init__(self) -> None:
        self._is_registered = self._is_on = False
        # The optimizer of the first step, and how many operations had been finished by then.
        self._first: tuple[int, int] | None = None

    def start(self) -> None:
        """Watch the next two steps."""
        self._first, self._is_on = None, True
        if not self._is_registered:
            # For good: torch fails if a hook removes itself while others follow.
            register_optimizer_step_post_hook(self._on_step)
            self._is_registered = True

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        if not self._is_on:
            return
        if (
            not basics.is_initialized()
            or hasattr(optimizer, "skip_synchronize")
            or (dist.is_available() and dist.is_initialized())  # torch may average gradients
        ):
            self._end()
            return
        now = (id(optimizer), basics.stats()["operations"])
        if self._first is None:
            self._first = now
        elif self._first[0] == now[0]:
            if self._first == now:
                warnings.warn(_WARNING, stacklevel=3)
            self._end()

    def _end(self) -> None:
        self._first, self._is_on = None, False


_watch = _Watch()


def watch() -> None:
    """Let rank 0 watch the optimizer, after parameters have been broadcast."""
    if basics.size() > 1 and basics.rank() == 0:
        _watch.start()
