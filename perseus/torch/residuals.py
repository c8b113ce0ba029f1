"""Converts residuals of lossy codecs for a state_dict(). Stateless; see gradients.residuals."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perseus.gradients.residuals import Held
from perseus.torch.functions import buffer_of

# (layout, data): the layout is that of gradients.residuals.Held. The data is float32 of shape (2,
# elements): the residuals of what this rank sends, and of the results that it owns.
Residual = tuple[int, torch.Tensor]


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
