"""Hooks of parameters, which autograd calls when it has accumulated a gradient, and of steps.

Stateless.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Owner = TypeVar("Owner")
Known = TypeVar("Known")
Step = TypeVar("Step", bound=Callable[..., Any])


def calls_hooked_step(step: Step) -> Step:
    """Mark a step() that calls a wrapped optimizer's, where torch runs the hooks of steps.

    Else load_state_dict() lets torch run them around this one, too.
    """
    cast(Any, step).hooked = True
    return step


def on_gradient(
    parameter: torch.Tensor,
    owner: Owner,
    call: Callable[[Owner, torch.Tensor, Known, bool], None],
    known: Known,
) -> Callable[[], object]:
    """Let every backward pass that reaches the parameter call call(owner, parameter, known, last).

    last: whether all other hooks have run, so that p.grad is what this pass leaves, and it has no
        other owner, which may reduce it, too. The hook keeps its place: one of the script that
        takes the step relies on its having counted the pass.

    The hook is removed when the owner is destroyed, or by the function that is returned. It does
    not keep the owner alive, because models outlive their optimizers.
    """
    reference = weakref.ref(owner)

    def hook(reached: torch.Tensor) -> None:
        living = reference()
        if living is not None:
            call(living, reached, known, _is_last(reached, registration.id))

    hook.of_perseus = True  # type: ignore[attr-defined]
    registration = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    remove = weakref.finalize(owner, registration.remove)
    remove.atexit = False
    return remove


def _is_last(parameter: torch.Tensor, number: int) -> bool:
    """Return whether no hook follows this one, and no other one of on_gradient() precedes it."""
    hooks = parameter._post_accumulate_grad_hooks
    numbers = list(hooks)
    if numbers[-1:] != [number]:  # it may also have been removed in this pass
        return False
    return not any(hasattr(hooks[each], "of_perseus") for each in numbers[:-1])
