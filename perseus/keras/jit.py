"""jit_compile="auto" for a distributed optimizer: no XLA, whose programs cannot call our ops.

Keras 3 takes it where there is a GPU. Keras 2 does not know the word, and takes it for True.
"""

from __future__ import annotations

import functools
from typing import Any

from perseus.keras.backend import KERAS_2, keras

_replaced = keras.Model.compile if KERAS_2 else keras.Model._resolve_auto_jit_compile


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_reducer")


def _choose(self: Any) -> bool:
    """No for a distributed optimizer, else as Keras 3 does."""
    return False if _is_distributed(getattr(self, "optimizer", None)) else bool(_replaced(self))


@functools.wraps(_replaced)
def _compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As in Keras 2, with None in the place of "auto" for a distributed optimizer."""
    optimizer = args[0] if args else kwargs.get("optimizer")
    if kwargs.get("jit_compile") == "auto" and _is_distributed(optimizer):
        kwargs["jit_compile"] = None
    return _replaced(self, *args, **kwargs)


def install() -> None:
    """Have models of distributed optimizers choose so; others are as before."""
    if KERAS_2:
        keras.Model.compile = _compile
    else:
        keras.Model._resolve_auto_jit_compile = _choose
