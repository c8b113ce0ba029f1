"""Residuals of lossy codecs in a state_dict(). Stateless; see perseus.gradients.residuals."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perseus.gradients.residuals import Held
from perseus.torch.functions import buffer_of

# (core's number for the placement of ranks; float32 of shape (2, elements): of what this rank
# sends, and of the results that it owns)
Residual = tuple[int, torch.Tensor]


def as_tensors(held: Mapping[str, Held]) -> dict[str, Residual]:
    """The residuals as tensors that share their memory."""
    return {
        name: (layout, torch.frombuffer(data, dtype=torch.float32).reshape(2, -1))
        for name, (layout, data) in held.items()
    }


def as_buffers(residuals: Mapping[str, Residual]) -> dict[str, Held]:
    """Copies of the tensors that as_tensors() gave, whatever device they are on now."""
    return {
        name: (layout, buffer_of(data.to(torch.float32)).tobytes())
        for name, (layout, data) in residuals.items()
    }
