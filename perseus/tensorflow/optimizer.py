"""DistributedOptimizer: reduces gradients over all ranks before they are applied.

This module serves optimizers of tf.compat.v1; perseus.tensorflow.horovod.keras serves Keras's.
Source of behaviour: Horovod 0.28.1, horovod.tensorflow.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.compression import Compressor
from perseus.gradients.arguments import (
    check_adasum_of_steps,
    checked_groups,
    checked_passes,
    checked_reduction,
    not_an_optimizer,
    wrapped_twice,
)
from perseus.gradients.participation import alone
from perseus.gradients.plan import Plan
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow.adasum import AdasumOptimizer
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, count_step
from perseus.tensorflow.learning_rate import learning_rate
from perseus.tensorflow.modes import when
from perseus.tensorflow.ops import Adasum, Average
from perseus.tensorflow.reducer import (
    GradientReducer,
    local_sources,
    reference_of,
    references_of,
)
from perseus.tensorflow.residuals import GradientResiduals
from perseus.tensorflow.verdicts import Verdicts


class _AggregationHelper(LocalGradientAggregationHelper):
    """The helper of an optimizer, which also knows whether the reducer withholds gradients."""

    def __init__(self, optimizer: Any, reducer: GradientReducer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizer = optimizer
        self._reducer = reducer

    def reduce(self, grads: list[Any], vars: list[Any]) -> tuple[list[Any], Any]:
        """See LocalGradientAggregationHelper."""
        return self._reducer(grads, vars, learning_rate=learning_rate(self._optimizer))


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A tf.compat.v1 optimizer that wraps another one and passes it reduced gradients."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.settings,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        residuals: GradientResiduals | None = None,
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._local = local_sources(process_set, scale_local_gradients)
        self._verdicts = Verdicts()
        plan = Plan(
            op=op,
            compression=compression,
            process_set=process_set,
            predivide_factor=gradient_predivide_factor,
            groups=references_of(groups),
            sparse_as_dense=sparse_as_dense,
            device_dense=device_dense,
            device_sparse=device_sparse,
        )
        self._reducer = (
            GradientReducer(f"{name}_Allreduce", plan)
            if residuals is None
            else residuals.reducer(plan)
        )
        self._agg_helper: _AggregationHelper | None = None
        if backward_passes_per_step > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "[tensorflow] backward_passes_per_step > 1 works with tf.compat.v1 optimizers "
                    "in graphs only; in eager mode use a Keras optimizer"
                )
            self._agg_helper = _AggregationHelper(
                optimizer,
                self._reducer,
                backward_passes_per_step,
                self._allreduce,
                sparse_as_dense,
                average_aggregated_gradients,
                basics.rank(),
                LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY,
                process_set,
                scale_local_gradients,
                name,
            )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of this variable on its rank."""
        self._local.register(var)
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

    def _allreduce(self, gradients: Any, variables: Any) -> list[Any]:
        """Return reduced gradients. Horovod's own tests call it."""
        return self._reducer(list(gradients), list(variables))[0]

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the wrapped optimizer's gradients, reduced over all ranks, and variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(gradients, variables)
        else:
            reduce = partial(self._reducer, learning_rate=learning_rate(self._optimizer))
            reduced, applies = self._local.around(reduce, gradients, variables)
            self._verdicts.give(zip(reduced, variables, strict=True), applies)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients with the wrapped optimizer.

        While gradients are being summed over steps, or if a NaN is to be skipped, all ranks only
        advance global_step.
        """
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if self._agg_helper is not None:
            return self._agg_helper.apply_gradients(
                apply, self._optimizer, pairs, global_step=global_step
            )
        applies = self._verdicts.on(pairs)
        if applies is None:
            return apply()
        return when(applies, apply, lambda: count_step(self._optimizer, global_step))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.settings,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    residuals: GradientResiduals | None = None,
) -> Any:
    """An optimizer that reduces gradients over all ranks before it applies them.

    optimizer: of tf.compat.v1.train, in graphs, tf.function or eager mode; or a Keras optimizer,
        see perseus.tensorflow.horovod.keras.
    name: of the optimizer; `Distributed<class>` without one. use_locking: as in TensorFlow.
    device_dense, device_sparse: where the reductions run; "" leaves it to TensorFlow.
    compression: how gradients are encoded on their way. Without it the settings decide, by default
        float16 between hosts; Compression.none keeps full precision everywhere.
    sparse_as_dense: send tf.IndexedSlices as dense tensors; without it their values and indices
        are gathered, with op Average or Sum only.
    backward_passes_per_step: passes that add up locally before gradients are reduced and applied,
        in graphs only; average_aggregated_gradients divides the sums by it. Passes with gradients
        of other variables, as of the two parts of a GAN, are counted on their own.
    op: Average, Sum, Min, Max or Product: of gradients. Adasum: of the steps that every rank's own
        optimizer takes.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum;
        only with Average.
    groups: reduce several gradients as one operation: an int makes that many groups in order; lists
        of variables form groups as given, all others are reduced one by one. Formerly num_groups.
    process_set: the ranks that take part.
    scale_local_gradients: divide the gradients of variables given to register_local_var() by the
        number of ranks.
    residuals: keeps the residuals of lossy codecs for checkpoints, with optimizers of tf.compat.v1;
        see hvd.GradientResiduals. Keras optimizers save them in their own files.

    Raises ValueError for inconsistent arguments.
    """
    checked_reduction(op, gradient_predivide_factor, compression, process_set, "tensorflow")
    checked_passes(backward_passes_per_step, "tensorflow")
    if isinstance(optimizer, (_DistributedOptimizer, AdasumOptimizer)):
        raise wrapped_twice("tensorflow")
    groups = checked_groups(groups, num_groups, "variable", reference_of)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op == Adasum and residuals is not None:
            raise ValueError("[tensorflow] residuals= is of gradients, op=Adasum combines steps")
        if op == Adasum and process_set.included() and not alone():
            check_adasum_of_steps("tensorflow")
            return AdasumOptimizer(
                optimizer, name, use_locking, device_dense, device_sparse, compression,
                backward_passes_per_step, process_set,
            )  # fmt: skip
        return _DistributedOptimizer(
            optimizer, name, use_locking, device_dense, device_sparse, compression,
            sparse_as_dense, op, gradient_predivide_factor, backward_passes_per_step,
            average_aggregated_gradients, groups, process_set, scale_local_gradients,
            residuals,
        )  # fmt: skip
    if residuals is not None:
        raise ValueError("[tensorflow] residuals= is for the gradients of tf.compat.v1 optimizers")
    if not isinstance(optimizer, _keras_classes()):
        raise not_an_optimizer(
            optimizer,
            "tensorflow",
            "an optimizer of Keras or tf.compat.v1.train",
            "tf.keras.optimizers.SGD(0.01)",
        )
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    keras = import_module("perseus.tensorflow.horovod.keras")  # it needs this module
    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def _keras_classes() -> tuple[type, ...]:
    """Return the optimizer classes of TensorFlow's Keras, and of tf_keras if it is loaded."""
    modules = [tf.keras.optimizers, getattr(tf.keras.optimizers, "legacy", None)]
    if "tf_keras" in sys.modules:
        modules.append(sys.modules["tf_keras"].optimizers)
        modules.append(getattr(sys.modules["tf_keras"].optimizers, "legacy", None))
    classes = []
    for module in modules:
        try:
            classes.append(module.Optimizer)
        except (AttributeError, ImportError):  # Keras 3 has `legacy` without optimizers
            continue
    return tuple(classes)
