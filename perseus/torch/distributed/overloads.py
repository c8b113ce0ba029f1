"""The forms of collectives that c10d's bindings take and a ProcessGroup in Python alone lacks.

Without a list around the tensor, without options, or with the options' values themselves. torch
calls some itself: DDP with unused parameters does in join(). And tensors that functional
collectives return, for which c10d's dispatcher waits. Profilers of torch see the calls. Pure
functions, thread-safe.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from perseus.torch.distributed.collectives import Collectives
from perseus.torch.distributed.work import NO_LIMIT

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
# By method: the options, the number of arguments before them, and what may come in their place.
_FORMS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "allreduce": (c10d.AllreduceOptions, 1, ("op", "timeout")),
    "allreduce_coalesced": (c10d.AllreduceCoalescedOptions, 1, ()),
    "reduce": (c10d.ReduceOptions, 1, ("root", "op", "timeout")),
    "broadcast": (c10d.BroadcastOptions, 1, ("root", "timeout")),
    "allgather": (c10d.AllgatherOptions, 2, ("timeout",)),
    "gather": (c10d.GatherOptions, 2, ("root", "timeout")),
    "scatter": (c10d.ScatterOptions, 2, ("root", "timeout")),
    "reduce_scatter": (c10d.ReduceScatterOptions, 2, ("op", "timeout")),
    "barrier": (c10d.BarrierOptions, 0, ("timeout",)),
}


def in_all_forms(group: type[Collectives]) -> type[Collectives]:
    """Give a class these forms of the methods that it has; return it."""
    own = {
        method
        for name, method in inspect.getmembers(Collectives, inspect.isfunction)
        if not name.startswith("_")
    }
    for name, method in inspect.getmembers(group, inspect.isfunction):
        if method in own:
            taking = _taking_results(method)
            form = _FORMS.get(name)
            setattr(group, name, taking if form is None else _in_all_forms(taking, *form))
    return group


def _taking_results(method: Callable[..., Any]) -> Callable[..., Any]:
    label = f"perseus:{method.__name__}"

    @functools.wraps(method)
    def taking_results(group: Collectives, *given: Any, **named: Any) -> Any:
        named = {name: _with_memory(each) for name, each in named.items()}
        parts = [_with_memory(each) for each in given]
        if not torch._C._autograd._profiler_enabled():
            return method(group, *parts, **named)
        with torch.profiler.record_function(label):
            return method(group, *parts, **named)

    return taking_results


def _with_memory(given: Any) -> Any:
    """The tensor for which a functional collective's result stands; lists with such tensors."""
    if isinstance(given, (list, tuple)):
        return [_with_memory(each) for each in given]
    if type(given) is torch.Tensor or not isinstance(given, torch.Tensor):
        return given
    if hasattr(given, "trigger_wait"):
        return given.trigger_wait()
    if hasattr(given, "__tensor_flatten__"):
        raise ValueError(
            f"[torch] collectives take tensors that have memory of their own, not a "
            f"{type(given).__name__}: pass .to_local() or .full_tensor() of a DTensor"
        )
    return given


def _in_all_forms(
    method: Callable[..., Any], options: Any, count: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_all_forms(group: Collectives, *given: Any, **named: Any) -> Any:
        has_options = len(given) > count and hasattr(given[count], "asyncOp")
        if has_options or len(given) < count:  # the bindings' own form, perhaps with keywords
            return method(group, *given, **named)
        tensors, values = given[:count], given[count:]
        if len(values) > len(names):
            raise TypeError(f"{method.__name__}() takes {count} to {count + len(names)} arguments")
        if sum(isinstance(each, torch.Tensor) for each in tensors) == 1:
            tensors = tuple([each] for each in tensors)
        opts = named.pop("opts", None) or options()
        for name, value in (*zip(names, values, strict=False), *named.items()):
            if value is not None:
                setattr(opts, _FIELDS[name], value)
        work = method(group, *tensors, opts)
        return work.limited(opts.timeout) if opts.timeout > NO_LIMIT else work

    return in_all_forms
