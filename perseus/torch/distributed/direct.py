"""Calls from Python to a ProcessGroup that has this backend: what they return, and the short way.

Where c10d takes a Backend in Python (torch 2.14 and later), a method of ProcessGroup passes
torch's dispatcher, which for 4 bytes takes several times as long as the collective, and returns a
work of its own. Both are mended here, by wrapping the methods of ProcessGroup; calls to other
backends go on as before. Any thread may call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from perseus.torch.distributed.collectives import Collectives
from perseus.torch.distributed.work import latest

# What torch.distributed calls for a work.
_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single",
    "send", "recv", "recv_anysource", "barrier", "_end_coalescing",
)  # fmt: skip
# Those that may go straight to the backend, and their options.
_DIRECT = {
    "allreduce": c10d.AllreduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
}
_HOOKS = ("register_pre_hook", "register_post_hook")
# Asked for, these want to see every call; torch's flight recorder is also there unasked.
_WATCHING = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK")
_HOST = torch.device("cpu")

# The backend for host tensors of a group; None where calls must take the long way.
_backends: WeakKeyDictionary[Any, Collectives | None] = WeakKeyDictionary()


def shorten_calls() -> None:
    """Wrap the methods of ProcessGroup. A second call does nothing."""
    for name in _METHODS:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            method = _returning_own(original)
            if name in _DIRECT:
                method = _direct(original, method, name)
            setattr(dist.ProcessGroup, name, method)
    for name in _HOOKS:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(dist.ProcessGroup, name, _noting_hook(original))


def _returning_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, but it returns a work as this backend has made it.

    c10d's own forwards wait() and get_future() but not is_completed() or exception(), and its
    future is one of torch's. Works of other backends are returned as they are.
    """

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        latest.asked, latest.work = True, None
        try:
            result = original(*args, **kwargs)
        finally:
            latest.asked = False
            work, latest.work = latest.work, None
        return result if work is None else work

    return method


def _direct(original: Any, long_way: Callable[..., Any], name: str) -> Callable[..., Any]:
    options = _DIRECT[name]

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and type(args[2]) is options and not kwargs and _is_plain(args[1]):
            backend = _backend_of(args[0])
            if backend is not None:
                return getattr(backend, name)(args[1], args[2])
        return long_way(*args, **kwargs)

    return method


def _noting_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        _backends[group] = None
        return original(group, *args, **kwargs)

    return method


def _is_plain(tensors: Any) -> bool:
    """Whether nothing but the backend wants to see an operation on these tensors."""
    if type(tensors) is not list or len(tensors) != 1:
        return False
    tensor = tensors[0]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and not tensor.requires_grad
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._autograd._profiler_enabled()
    )


def _backend_of(group: Any) -> Collectives | None:
    try:
        return _backends[group]
    except KeyError:
        backend = None
        if not any(os.environ.get(name, "0") not in ("", "0") for name in _WATCHING):
            try:
                found = group._get_backend(_HOST)
            except RuntimeError:  # for other devices only
                found = None
            backend = found if isinstance(found, Collectives) else None
        _backends[group] = backend
        return backend
