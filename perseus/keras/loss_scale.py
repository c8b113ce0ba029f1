"""mixed_float16: ranks agree whether gradients are finite.

Under that policy `compile` puts a LossScaleOptimizer around the optimizer. It leaves out the step
when a gradient is not finite, looking at its own rank's only: the others would take the step, wait
for that rank's gradients and go on with another scale. What it looks at stays away from the core,
where one infinite gradient would spoil what codecs hold back and what is being summed up.
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
    """Have LossScaleOptimizers of distributed optimizers ask all ranks; others are as before."""
    keras.optimizers.LossScaleOptimizer.check_finite = _check_everywhere
