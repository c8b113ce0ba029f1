"""Under mixed_float16, ranks agree on whether gradients are finite.

Under that policy `compile` puts a LossScaleOptimizer around the optimizer. It skips the step
if a gradient of its own rank is not finite: the other ranks would take the step, wait for that
rank's gradients and continue with another scale. The check comes before the core, in which one
infinite gradient would spoil residuals and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

_local_check = keras.optimizers.LossScaleOptimizer.check_finite


def _check_everywhere(self: Any, grads: Sequence[Any]) -> Any:
    """Whether all gradients are finite, on every rank where the optimizer is distributed."""
    finite = _local_check(self, grads)
    reducer = getattr(self.inner_optimizer, "_reducer", None)
    return finite if reducer is None or not reducer.active() else reducer.everywhere(finite)


def install() -> None:
    """Have LossScaleOptimizers of distributed optimizers ask all ranks; others stay as they are."""
    keras.optimizers.LossScaleOptimizer.check_finite = _check_everywhere
