"""Horovod's class for backward_passes_per_step in eager mode, which needs no code of its own."""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow.gradient_aggregation import LocalGradientAggregationHelper


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """LocalGradientAggregationHelper with the arguments that it has for a Keras optimizer."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        self.allreduce_grads = allreduce_func
        super().__init__(
            backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients,
            0, self._OPTIMIZER_TYPE_KERAS, process_set, scale_local_gradients,
        )  # fmt: skip
