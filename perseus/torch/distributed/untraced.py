"""Keeps torch.compile out of the backend: a graph ends before it, and goes on behind it.

C++ calls the methods of a backend, also while a compiled function runs, and torch would try to
compile those too: they hold locks and call the core, which it cannot trace.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Any)


def leave_untraced(*classes: type) -> None:
    """Let torch.compile skip the methods that these classes have from Perseus, and their calls."""
    for owner in classes:
        for _, method in inspect.getmembers(owner, inspect.isfunction):
            if method.__module__.startswith("perseus."):
                untraced(method)


def untraced(function: _Function) -> _Function:
    """Let torch.compile skip a function and its calls; return it."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    # Where a compiled function itself calls it, as a method of a work.
    function._torchdynamo_disable = True
    return function
