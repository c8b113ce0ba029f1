"""Ops in functions that XLA compiles: refused while they are traced, in words that say what to do.

TensorFlow itself would only say, when the function runs, that no such kernel is registered; it does
where a function had been traced before one with jit_compile=True called it. Thread-safe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def _within_xla() -> bool:
    """Whether what is made now belongs to a function with jit_compile=True."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    if context.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def _guarded(name: str, function: Callable[..., Any]) -> Any:
    from tensorflow import autograph

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _within_xla():
            raise NotImplementedError(
                f"[tensorflow] {name} is called in a function that XLA compiles, which it cannot: "
                "pass jit_compile=False, to tf.function or to Keras' Model.compile"
            )
        return function(*args, **kwargs)

    return autograph.experimental.do_not_convert(make)


def guarded(functions: Any) -> SimpleNamespace:
    """The generated functions of our ops, which raise NotImplementedError where XLA compiles."""
    return SimpleNamespace(
        **{
            name: _guarded(name, function)
            for name, function in vars(functions).items()
            if name.startswith("perseus_") and callable(function)
        }
    )
