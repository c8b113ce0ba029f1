"""Communication hooks for DistributedDataParallel that send less, on every backend of torch.

    from perseus.torch.ddp import hooks

    state = hooks.register_comm_hook(model, "int8")

is, apart from the names of parameters in saved states,

    model.register_comm_hook(hooks.Int8State(model.process_group), hooks.int8_hook)

torch's own collectives move the bytes. Results have the same bits on all ranks. What a hook leaves
out, it adds to the next gradients. Nothing here needs hvd.init().
"""
# Without `from __future__ import annotations`: DDP compares a hook's annotations with classes.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from perseus.torch.ddp.auto import Auto
from perseus.torch.ddp.gradients import Exact, Exchange
from perseus.torch.ddp.owners import OwnerExchange
from perseus.torch.ddp.sparse import Rotate, TopK
from perseus.torch.ddp.state import HookState, NamedParameters

__all__ = [
    "AutoState",
    "BF16State",
    "FP16State",
    "HookState",
    "Int8State",
    "RotateState",
    "TopKState",
    "auto_hook",
    "bf16_hook",
    "fp16_hook",
    "int8_hook",
    "register_comm_hook",
    "rotate_hook",
    "topk_hook",
]

_RATIO, _WARM_UP, _EVERY = 0.01, 100, 2


class FP16State(HookState):
    """The state of fp16_hook."""

    name = "fp16"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group."""
        super().__init__(OwnerExchange(torch.float16), {}, process_group, named_parameters)


class BF16State(HookState):
    """The state of bf16_hook."""

    name = "bf16"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group."""
        super().__init__(OwnerExchange(torch.bfloat16), {}, process_group, named_parameters)


class Int8State(HookState):
    """The state of int8_hook."""

    name = "int8"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group."""
        super().__init__(OwnerExchange(torch.int8), {}, process_group, named_parameters)


class TopKState(HookState):
    """The state of topk_hook."""

    name = "topk"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ratio: float = _RATIO,
        warm_up: int = _WARM_UP,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group.

        ratio: the fraction of a parameter's elements to send, above 0 and at most 1. warm_up: the
        number of steps in which the fraction falls from 1/4 to the ratio; 0 = none.
        Raises ValueError for other values.
        """
        if not 0 < ratio <= 1:
            raise ValueError(f"[ddp] topk, ratio={ratio}: expected a fraction above 0, at most 1")
        if warm_up < 0:
            raise ValueError(f"[ddp] topk, warm_up={warm_up}: expected a number of steps, or 0")
        options = {"ratio": ratio, "warm_up": warm_up}
        super().__init__(TopK(ratio, warm_up), options, process_group, named_parameters)


class RotateState(HookState):
    """The state of rotate_hook."""

    name = "rotate"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        n: int = _EVERY,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group.

        n: each element is sent every n-th step. Raises ValueError unless it is 1 to 1024.
        """
        if not (isinstance(n, int) and 1 <= n <= 1024):
            raise ValueError(f"[ddp] rotate, n={n}: expected a whole number from 1 to 1024")
        super().__init__(Rotate(n), {"n": n}, process_group, named_parameters)


class AutoState(HookState):
    """The state of auto_hook."""

    name = "auto"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        candidates: Sequence[str] = ("exact", "fp16", "int8"),
        ratio: float = _RATIO,
        named_parameters: NamedParameters | None = None,
    ) -> None:
        """process_group: the model's; None = the default group.

        candidates: what to choose from, of "exact", "fp16", "bf16", "int8" and "topk", the one
        preferred first. ratio: topk's, which begins with topk_hook's usual warm-up. topk is no
        candidate by default: it does not always end training where exact gradients do.
        Raises ValueError for other names.
        """
        known: dict[str, Callable[[], Exchange]] = {
            "exact": Exact,
            "fp16": lambda: OwnerExchange(torch.float16),
            "bf16": lambda: OwnerExchange(torch.bfloat16),
            "int8": lambda: OwnerExchange(torch.int8),
            "topk": lambda: TopK(ratio, _WARM_UP),
        }
        if not candidates or not set(candidates) <= set(known):
            names = ", ".join(known)
            raise ValueError(f"[ddp] auto, candidates={candidates}: expected some of {names}")
        options = {"candidates": list(candidates), "ratio": ratio}
        exchange = Auto({name: known[name] for name in candidates})
        super().__init__(exchange, options, process_group, named_parameters)


def fp16_hook(state: FP16State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send float16, with a power of two for each 256 elements: nothing overflows."""
    return state.exchange(bucket)


def bf16_hook(state: BF16State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send bfloat16."""
    return state.exchange(bucket)


def int8_hook(state: Int8State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send int8, with a scale for each 256 elements."""
    return state.exchange(bucket)


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest elements of each parameter; biases, norms and small ones whole."""
    return state.exchange(bucket)


def rotate_hook(state: RotateState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send another n-th of the elements in each step. See docs/ddp_hooks.md: it may diverge."""
    return state.exchange(bucket)


def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send whatever was the fastest in the third step."""
    return state.exchange(bucket)


_HOOKS: dict[str, tuple[Any, Any]] = {
    "fp16": (FP16State, fp16_hook),
    "bf16": (BF16State, bf16_hook),
    "int8": (Int8State, int8_hook),
    "topk": (TopKState, topk_hook),
    "rotate": (RotateState, rotate_hook),
    "auto": (AutoState, auto_hook),
}


def register_comm_hook(model: DistributedDataParallel, name: str, **options: Any) -> HookState:
    """Let a model exchange its gradients through one of these hooks; return the hook's state.

    name: "fp16", "bf16", "int8", "topk" (options: ratio, warm_up), "rotate" (n) or "auto"
    (candidates, ratio). Call it on every rank, once, before the first backward pass.
    Raises ValueError for another name or value, TypeError unless the model is a
    DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"[ddp] register_comm_hook: expected a DistributedDataParallel, got a "
            f"{type(model).__name__}; wrap the model first"
        )
    if name not in _HOOKS:
        raise ValueError(f"[ddp] unknown hook {name!r}: choose one of {', '.join(_HOOKS)}")
    make, hook = _HOOKS[name]
    names = model.module.named_parameters()
    state: HookState = make(model.process_group, named_parameters=names, **options)
    model.register_comm_hook(state, hook)
    return state
