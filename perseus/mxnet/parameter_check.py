"""PERSEUS_PARAMETER_CHECK_N_STEPS for MXNet's arrays. Belongs to the thread that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from perseus.gradients.parameter_check import ParameterCheck
from perseus.mxnet.step_keys import StepKeys
from perseus.process_sets import ProcessSet, global_process_set


def buffer_of(array: Any) -> Any:
    """Return the bytes of a dense or sparse array, after its pending writes have ended."""
    return np.ascontiguousarray(array.asnumpy()).reshape(-1).view(np.uint8)


class WeightsByKey(ParameterCheck):
    """Compares weights that are updated one by one; see StepKeys.

    name_of: returns the name of a key's weight, for messages.
    """

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        name_of: Callable[[Any], str] = str,
    ) -> None:
        self._name_of = name_of
        self._weights: dict[Any, Any] = {}
        self._steps = StepKeys()
        super().__init__(process_set)

    def begin_world(self) -> None:
        """Forget weights, too: new ranks lack those that are not trained any more."""
        super().begin_world()
        self._weights.clear()
        self._steps = StepKeys()

    def update(self, key: Any, weight: Any) -> None:
        """Compare all weights if that is due; call it before a weight is updated."""
        if self.every == 0:
            return
        if self._steps.begins(key) and self.due():
            weights = self._weights.items()
            self.compare((self._name_of(k), buffer_of(array)) for k, array in weights)
        self._weights[key] = weight
