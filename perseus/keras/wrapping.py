"""Turns the arguments of DistributedOptimizer into an optimizer of the Keras in use.

Stateless.
"""

from __future__ import annotations

from typing import Any

from perseus.gradients.arguments import (
    checked_groups,
    checked_passes,
    checked_reduction,
    not_an_optimizer,
    wrapped_twice,
)
from perseus.gradients.plan import Plan
from perseus.keras.backend import backend
from perseus.keras.library import KERAS_2, keras
from perseus.keras.nesting import with_inner
from perseus.keras.reducer import Options

if KERAS_2:
    from perseus.keras import keras2_optimizer as _kind
else:
    from perseus.keras import optimizer as _kind  # type: ignore[no-redef]


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer is a DistributedOptimizer, or contains one."""
    return bool(distributed_in(optimizer))


def distributed_in(optimizer: Any) -> list[Any]:
    """Return the DistributedOptimizers among an optimizer and those that it contains."""
    return [each for each in with_inner(optimizer) if isinstance(each, _kind.DistributedMixin)]


def distribute(optimizer: Any, options: Options) -> Any:
    """A distributed optimizer of the same class, with the options and the state of `optimizer`.

    A LossScaleOptimizer stays one, around a distributed one. ValueError for anything else.
    """
    if is_distributed(optimizer):
        raise wrapped_twice("keras")
    optimizers = keras.optimizers
    classes = (
        (optimizers.Optimizer, optimizers.legacy.Optimizer) if KERAS_2 else optimizers.Optimizer
    )
    if not isinstance(optimizer, classes):
        hint = ""
        if type(optimizer).__module__.startswith("tf_keras"):
            hint = " (for those of tf_keras set TF_USE_LEGACY_KERAS=1)"
        raise not_an_optimizer(
            optimizer,
            "keras",
            f"an optimizer of Keras {keras.__version__}{hint}",
            "keras.optimizers.SGD(0.01)",
        )
    return _kind.distribute(optimizer, options)


def make_options(  # noqa: PLR0917 - all are given
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    num_groups: int,
    groups: Any,
    process_set: Any,
    scale_local_gradients: bool,
) -> Options:
    """The checked arguments of DistributedOptimizer; ValueError if they are inconsistent."""
    op = checked_reduction(op, gradient_predivide_factor, compression, process_set, "keras")
    if op not in (backend.Average, backend.Sum):
        raise ValueError("[keras] op: expected Average or Sum; Adasum is not supported with Keras")
    checked_passes(backward_passes_per_step, "keras")
    plan = Plan(
        op=op,
        compression=compression,
        process_set=process_set,
        predivide_factor=gradient_predivide_factor,
        groups=checked_groups(groups, num_groups, "variable", id, stacklevel=4),
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return Options(
        name, plan, scale_local_gradients, backward_passes_per_step, average_aggregated_gradients
    )
