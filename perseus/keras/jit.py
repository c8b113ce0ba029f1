"""jit_compile="auto" of a distributed optimizer means no XLA, which cannot call our ops.

Keras 3 would choose XLA on a GPU. Keras 2 does not know "auto" and treats it as True.
"""

from __future__ import annotations

import functools
from typing import Any

from perseus.keras.library import KERAS_2, keras
from perseus.keras.nesting import with_inner

_replaced = keras.Model.compile if KERAS_2 else keras.Model._resolve_auto_jit_compile


def _is_distributed(optimizer: Any) -> bool:
    return any(hasattr(each, "_reducer") for each in with_inner(optimizer))


def _choose(self: Any) -> bool:
    """False for a distributed optimizer; otherwise Keras 3's own choice."""
    return False if _is_distributed(getattr(self, "optimizer", None)) else bool(_replaced(self))


@functools.wraps(_replaced)
def _compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras 2's compile, with None instead of "auto" for a distributed optimizer."""
    optimizer = args[0] if args else kwargs.get("optimizer")
    if kwargs.get("jit_compile") == "auto" and _is_distributed(optimizer):
        kwargs["jit_compile"] = None
    return _replaced(self, *args, **kwargs)


def install() -> None:
    """Have models of distributed optimizers choose so; others keep Keras's choice."""
    if KERAS_2:
        keras.Model.compile = _compile
    else:
        keras.Model._resolve_auto_jit_compile = _choose
