"""Keeps torch.compile out of functions: a graph ends before their calls, and goes on behind them.

torch would try to compile what a compiled function calls, and also what C++ calls while it runs: a
backend's methods, hooks of gradients. It cannot trace locks and calls of the core, and where it
ends a graph inside of a method, it may lose what the method has written to attributes.
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
    """Let torch.compile skip a function and its calls; return it.

    Calls cost nothing more. It must come below decorators that wrap functions: the code of those is
    shared by all that they wrap. Old versions of PyTorch, which cannot be told, trace the function.
    """
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
        # Where a compiled function itself calls it, as a method of a work.
        function._torchdynamo_disable = True
    return function
