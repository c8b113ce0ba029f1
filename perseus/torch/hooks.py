"""Hooks of parameters, which autograd calls when it has accumulated a gradient, and of steps.

Stateless.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from perseus.torch.untraced import untraced

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
    in_place: bool,
) -> Callable[[], object]:
    """Let every backward pass that reaches the parameter call call(owner, parameter, known, last).

    in_place: whether the owner may reduce p.grad in place.
    last: whether all hooks of others have run, so that p.grad is what this pass leaves, and no
        other owner may reduce it in place, too. The hook keeps its place: one of the script that
        takes the step relies on its having counted the pass.

    The hook is removed when the owner is destroyed, or by the function that is returned. It does
    not keep the owner alive, because models outlive their optimizers.
    """
    reference = weakref.ref(owner)

    @untraced
    def hook(reached: torch.Tensor) -> None:
        living = reference()
        if living is not None:
            call(living, reached, known, _is_last(reached, registration.id))

    hook.in_place = in_place  # type: ignore[attr-defined]
    registration = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    remove = weakref.finalize(owner, registration.remove)
    remove.atexit = False
    return remove


def _is_last(parameter: torch.Tensor, number: int) -> bool:
    """Return whether no hook that follows changes the gradient, nor an owner that precedes."""
    hooks = parameter._post_accumulate_grad_hooks
    if len(hooks) == 1:  # as nearly always, for every gradient of every step
        return number in hooks
    numbers = list(hooks)
    if number not in numbers:  # it was removed in this pass
        return False
    at = numbers.index(number)
    before = (getattr(hooks[each], "in_place", False) for each in numbers[:at])
    after = (getattr(hooks[each], "in_place", True) for each in numbers[at + 1 :])
    return not any(before) and not any(after)
