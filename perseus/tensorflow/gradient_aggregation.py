"""backward_passes_per_step: gradients are summed locally, and every N-th pass reduces the sums.

Each optimizer has its own helper. Source of behaviour: Horovod 0.28.1,
horovod.tensorflow.gradient_aggregation.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from perseus.gradients.aggregation import LocalAggregation
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow import own_variables
from perseus.tensorflow.modes import belongs_to_program, tf_variable, vars_to_refs, when
from perseus.tensorflow.reducer import local_sources
from perseus.tensorflow.verdicts import Verdicts


def apply_op_to_not_none_tensors(
    tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any
) -> list[Any]:
    """Return tensor_op(tensor, *args) for each tensor; None stays None."""
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """Return the elements that are not None."""
    return [tensor for tensor in tensor_list if tensor is not None]


class LocalGradientAggregationHelper:
    """Sums gradients and reduces them on every N-th pass, in eager mode and in graphs.

    Passes with gradients of other variables have sums and a count of their own, because a script
    may train the two parts of a model in turn by one optimizer, or unfreeze some variables.

    backward_passes_per_step: N, at least 1.
    allreduce_func: (gradients, variables) -> reduced gradients.
    sparse_as_dense: make tf.IndexedSlices dense; otherwise they raise ValueError.
    average_aggregated_gradients: divide the sums by N.
    rank: this process's rank, for the names of variables.
    optimizer_type: one of the class's two constants, as in Horovod.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.name = name
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self.locally_aggregated_grads: list[Any] = []
        self.sparse_as_dense = sparse_as_dense
        self.rank = rank
        self.optimizer_type = optimizer_type
        self.not_none_indexes: dict[int, int] = {}
        self.num_none_grad_updates = 0
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._passes: dict[Any, LocalAggregation] = {}  # by references to the variables
        self._allreduce = allreduce_func
        self._local = local_sources(process_set, scale_local_gradients)
        self._verdicts = Verdicts()
        self.counter: Any = None  # of the last pass; None before the first one

    def forget(self) -> None:
        """Begin with the first pass of a step, except in a graph that a session runs."""
        for passes in self._passes.values():
            passes.forget()

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of this variable on its rank."""
        self._local.register(var)

    def reduce(self, grads: list[Any], vars: list[Any]) -> tuple[list[Any], Any]:
        """Return gradients reduced over all ranks, and whether to apply them (None = yes)."""
        return list(self._allreduce(grads, vars)), None

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add gradients to the sums; return the reduced sums on every N-th pass, else the sums.

        None stays None.
        """
        dense = [self._densified(gradient) for gradient in grads]
        present = [index for index, gradient in enumerate(dense) if gradient is not None]
        self.not_none_indexes = {index: place for place, index in enumerate(present)}
        self.num_none_grad_updates = len(dense) - len(present)
        given, variables = [dense[index] for index in present], [vars[index] for index in present]
        passes = self._passes_of(given, variables)
        self.locally_aggregated_grads, self.counter = passes.sums, passes.counter
        outcome = passes.add(
            passes.sums,
            given,
            lambda totals: self._reduced(totals, variables),
            lambda totals: (*totals, tf.constant(False)),
        )
        # In a graph, Keras 2 treats variables from which gradients are computed as trainable ones.
        *results, applies = [tf.stop_gradient(tensor) for tensor in outcome]
        self._verdicts.give(zip(given, variables, strict=True), applies)
        full: list[Any] = [None] * len(dense)
        for index, gradient in zip(present, results, strict=True):
            full[index] = gradient
        return full

    def apply_gradients(
        self,
        apply_grads_closure: Callable[[], Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the closure after an N-th pass; after other passes, only count a step.

        args, kwargs: the arguments of the optimizer's apply_gradients(): gradients and variables,
            and perhaps `global_step`.
        """
        pairs = args[0] if args else kwargs.get("grads_and_vars")
        # An iterator would be exhausted when the closure reads it.
        applies = self._verdicts.on(pairs if isinstance(pairs, list | tuple) else ())
        if applies is None:
            return apply_grads_closure()
        return when(applies, apply_grads_closure, lambda: self._count(optimizer, args, kwargs))

    def _densified(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
                "`sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _passes_of(self, grads: list[Any], variables: list[Any]) -> LocalAggregation:
        """Return the passes with gradients of exactly these variables."""
        key = vars_to_refs(variables)
        passes = self._passes.get(key)
        if passes is not None and belongs_to_program(passes.counter):
            return passes
        passes = self._passes[key] = LocalAggregation(
            self.backward_passes_per_step,
            self.average_aggregated_gradients,
            own_variables.OwnVariables(),
        )
        with tf.init_scope():
            passes.counter = self._variable(tf.zeros([], tf.int32), "aggregation_counter")
            for index, (gradient, variable) in enumerate(zip(grads, variables, strict=True)):
                zeros = tf.zeros(tf_variable(variable).shape, gradient.dtype)
                passes.sums.append(self._variable(zeros, f"sum_{index}"))
        return passes

    def _variable(self, initial: Any, name: str) -> Any:
        scope = f"{self.name or 'aggregation'}_variables_{self.rank}"
        return own_variables.make(initial, f"{scope}/{name}")

    def _reduced(self, totals: list[Any], variables: list[Any]) -> tuple[Any, ...]:
        """Return the reduced sums of a complete step, and whether they may be applied."""
        reduced, applies = self._local.around(self.reduce, totals, variables)
        reduced = [tf.identity(gradient) for gradient in reduced]
        return (*reduced, tf.constant(True) if applies is None else tf.identity(applies))

    def _count(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return count_step(optimizer, args[1] if len(args) > 1 else kwargs.get("global_step"))


def count_step(optimizer: Any, global_step: Any) -> Any:
    """Count a step that is not applied, in the counter that the optimizer uses for steps."""
    if hasattr(optimizer, "iterations"):
        return optimizer.iterations.assign_add(1)
    if global_step is None:
        return None
    return tf.compat.v1.assign_add(global_step, tf.ones([], tf_variable(global_step).dtype))
