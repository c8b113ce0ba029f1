"""jit_compile="auto": Keras takes XLA where there is a GPU, whose programs cannot call our ops."""

from __future__ import annotations

from typing import Any

import keras

_choice = keras.Model._resolve_auto_jit_compile


def _choose(self: Any) -> bool:
    """No for a distributed optimizer, else as Keras does."""
    optimizer = getattr(self, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return False if hasattr(inner, "_exchange") else bool(_choice(self))


def install() -> None:
    """Have models of distributed optimizers choose so; others are as before."""
    keras.Model._resolve_auto_jit_compile = _choose
