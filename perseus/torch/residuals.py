"""Residuals of lossy codecs in a state_dict(). Stateless; see gradients.residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from perseus import basics
from perseus.gradients.residuals import Held
from perseus.torch.functions import buffer_of

# (layout, data): the layout is that of gradients.residuals.Held. The data is float32 of shape (2,
# elements): the residuals of what this rank sends, and of the results that it owns.
Residual = tuple[int, torch.Tensor]

# The key of a state_dict() with the rank that has its residuals. Without it they are this process's
# own: elastic states leave it out, since their processes may get another rank.
OWNER = "perseus_rank"


def with_owner(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that contains residuals, with this rank as their owner."""
    return {**state, OWNER: basics.rank()} if basics.is_initialized() else state


def as_tensors(held: Mapping[str, Held]) -> dict[str, Residual]:
    """Return the residuals as tensors that share the buffers' memory."""
    return {
        name: (layout, torch.frombuffer(data, dtype=torch.float32).reshape(2, -1))
        for name, (layout, data) in held.items()
    }


def as_buffers(residuals: Mapping[str, Residual]) -> dict[str, Held]:
    """Return copies of tensors of as_tensors(), which may be on another device by now."""
    return {
        name: (layout, buffer_of(data.to(torch.float32)).tobytes())
        for name, (layout, data) in residuals.items()
    }
