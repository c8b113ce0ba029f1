"""Around a distributed optimizer, LossScaleOptimizers agree on finite gradients, and are copied.

Under mixed_float16, `compile` puts a LossScaleOptimizer around the optimizer, which skips the step
if a gradient of its own rank is not finite. Without an agreement, the other ranks would take the
step, wait for that rank's gradients and continue with another scale. The check runs before the core
reduces gradients, because one infinite gradient would corrupt its residuals and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from perseus.keras.copies import COPIES_ARE_LOADED, loaded_copy
from perseus.keras.nesting import with_inner

_local_check = keras.optimizers.LossScaleOptimizer.check_finite


def _check_everywhere(self: Any, grads: Sequence[Any]) -> Any:
    """Return whether all gradients are finite, on all ranks if the optimizer is distributed."""
    finite = _local_check(self, grads)
    for optimizer in with_inner(self):
        reducer = getattr(optimizer, "_reducer", None)
        if reducer is not None and reducer.active():
            finite = reducer.everywhere(finite)
    return finite


def _copied(self: Any, memo: Any = None) -> Any:
    """Return a copy around a distributed optimizer if the original is around one."""
    del memo
    made, inner = loaded_copy(self), self.inner_optimizer
    return inner.distribute_alike(made) if hasattr(inner, "_reducer") else made


def install() -> None:
    """Change LossScaleOptimizers around distributed optimizers; others stay as they are."""
    kind = keras.optimizers.LossScaleOptimizer
    kind.check_finite = _check_everywhere
    if COPIES_ARE_LOADED:
        kind.__copy__ = kind.__deepcopy__ = _copied
