"""Hooks of parameters, which autograd calls when it has accumulated a gradient. Stateless."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

Owner = TypeVar("Owner")
Known = TypeVar("Known")


def on_gradient(
    parameter: torch.Tensor,
    owner: Owner,
    call: Callable[[Owner, torch.Tensor, Known], None],
    known: Known,
) -> None:
    """Let every backward pass that reaches the parameter call call(owner, parameter, known).

    The hook is removed when the owner is destroyed. It does not keep the owner alive, because
    models outlive their optimizers.
    """
    reference = weakref.ref(owner)

    def hook(reached: torch.Tensor) -> None:
        living = reference()
        if living is not None:
            call(living, reached, known)

    registration = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, registration.remove).atexit = False
