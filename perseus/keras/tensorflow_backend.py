"""Keras on TensorFlow: reductions by perseus.tensorflow. Stateless; see perseus.keras.backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from perseus.compression import Compressor
from perseus.gradients.plan import Plan
from perseus.gradients.scopes import Scope
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow import functions, mpi_ops, ops, reductions
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.elastic import run
from perseus.tensorflow.modes import tf_variable
from perseus.tensorflow.ops import Adasum, Average, Max, Sum
from perseus.tensorflow.parameter_check import compared
from perseus.tensorflow.reducer import GradientReducer

__all__ = ["Adasum", "Average", "Compression", "Sum", "compared", "run"]


class _Reducer(GradientReducer):
    """See BackendReducer."""

    def __init__(self, scope: Scope, plan: Plan) -> None:
        super().__init__(scope, plan, lasting=True)

    def before_backward(
        self, variables: Sequence[Any], names: Sequence[str], rate_of: Callable[[], Any]
    ) -> None:
        """See BackendReducer. In functions, reductions begin by themselves as soon as they can."""

    def reduce(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        bundles: Sequence[Sequence[int]],
        learning_rate: Any = None,
    ) -> tuple[list[Any], Any]:
        """See BackendReducer. tf.IndexedSlices go one by one, unless made dense."""
        dense = [
            self.plan.sparse_as_dense or not isinstance(gradient, tf.IndexedSlices)
            for gradient in gradients
        ]
        parts = (tuple(index for index in bundle if dense[index]) for bundle in bundles)
        dense_bundles = tuple(part for part in parts if part)
        return super().reduce(list(gradients), tuple(names), dense_bundles, learning_rate)


def uncompiled(function: Any) -> Any:
    """See Backend. TensorFlow's functions contain our ops."""
    return function


def make_reducer(scope: Scope, plan: Plan) -> _Reducer:
    """See Backend."""
    return _Reducer(scope, plan)


def dense(gradient: Any) -> Any:
    """See Backend."""
    return tf.convert_to_tensor(gradient)


def zeros_like(variable: Any) -> Any:
    """See Backend."""
    return tf.zeros_like(tf_variable(variable))


def outside_functions() -> AbstractContextManager[Any]:
    """See Backend."""
    scope: AbstractContextManager[Any] = tf.init_scope()
    return scope


def divided_by_size(gradient: Any, process_set: ProcessSet) -> Any:
    """See Backend."""
    return reductions.divided_by_size(gradient, process_set)


def _evaluated(result: Any) -> Any:
    """The result of an operation; Keras 2 without eager execution runs it in a session."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return result
    return tf.compat.v1.keras.backend.get_session().run(result)


def everywhere(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """See Backend."""
    # The maximum of the opposite, since a rank that has joined gives zeros.
    number = tf.cast(tf.logical_not(flag), tf.int32)
    outputs, _ = ops.allreduce([number], [name], op=Max, process_set=process_set)
    return tf.equal(outputs[0], 0)


def maximum(values: Any, name: str, process_set: ProcessSet) -> Any:
    """See Backend."""
    outputs, _ = ops.allreduce([values], [name], op=Max, process_set=process_set)
    return outputs[0]


def average(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """See Backend."""
    outputs, _ = ops.allreduce(
        [tf.constant(values)], [name], op=Average, process_set=global_process_set
    )
    return np.asarray(_evaluated(outputs[0]))


def broadcast_variables(variables: Sequence[Any], root_rank: int, prefix: str) -> None:
    """See Backend."""
    _evaluated(functions.broadcast_variables(variables, root_rank))


def broadcast_global_variables(root_rank: int) -> Any:
    """See Backend."""
    return functions.broadcast_global_variables(root_rank)


def broadcast_object(obj: Any, root_rank: int, name: str) -> Any:
    """See Backend."""
    return functions.broadcast_object(obj, root_rank, name=name)


def allreduce(  # noqa: PLR0917 - all are given
    value: Any,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    compression: type[Compressor],
) -> Any:
    """See Backend."""
    return _evaluated(
        reductions.allreduce(
            tf.convert_to_tensor(value),
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None) -> Any:
    """See Backend."""
    return _evaluated(mpi_ops.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    """See Backend."""
    return _evaluated(mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None, op: int) -> Any:
    """See Backend."""
    return _evaluated(reductions.reducescatter(tf.convert_to_tensor(value), name=name, op=op))
