"""PERSEUS_PARAMETER_CHECK_N_STEPS for MXNet's arrays. Belongs to the thread that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from perseus.gradients.parameter_check import ParameterCheck
from perseus.process_sets import ProcessSet, global_process_set


def buffer_of(array: Any) -> Any:
    """The bits of an array, sparse or dense; waits until pending writes have ended."""
    return np.ascontiguousarray(array.asnumpy()).reshape(-1).view(np.uint8)


class WeightsByKey:
    """Weights that come one by one; a step ends when one of them comes again.

    name_of: the name of a key's weight in messages.
    """

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        name_of: Callable[[Any], str] = str,
    ) -> None:
        self._name_of = name_of
        self._check = ParameterCheck(process_set)
        self._weights: dict[Any, Any] = {}
        self._of_step: set[Any] = set()

    def update(self, key: Any, weight: Any) -> None:
        """Before a weight is updated: compare all of them, if that is due."""
        if self._check.every == 0:
            return
        if not self._of_step or key in self._of_step:
            self._of_step.clear()
            if self._check.due():
                weights = self._weights.items()
                self._check.compare((self._name_of(k), buffer_of(array)) for k, array in weights)
        self._of_step.add(key)
        self._weights[key] = weight
