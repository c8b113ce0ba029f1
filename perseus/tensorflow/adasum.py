"""DistributedOptimizer(op=Adasum): every rank takes its own step, and Adasum combines the steps.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; behaviour
of Horovod 0.28.1, horovod.tensorflow.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from typing import Any

import tensorflow as tf

from perseus.compression import Compressor
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.modes import (
    belongs_to_program,
    on_device,
    tf_variable,
    when,
)
from perseus.tensorflow.ops import Adasum
from perseus.tensorflow.reductions import allreduce


class AdasumOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A tf.compat.v1 optimizer around another one, whose steps are combined over all ranks.

    backward_passes_per_step: steps that a rank takes alone before they are combined.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.settings,
        backward_passes_per_step: int = 1,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        name = name or f"DistributedDelta{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._device_dense = device_dense
        self._device_sparse = device_sparse
        self._compression = compression
        self._passes = backward_passes_per_step
        self._process_set = process_set
        self._counter: Any = None
        self._starts: list[Any] = []

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's gradients: Adasum reduces steps, not gradients."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """The wrapped optimizer's step, and on every N-th one the Adasum of all ranks' steps."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        variables = [tf_variable(variable) for gradient, variable in pairs if gradient is not None]
        if self._passes > 1:
            return self._apply_some(pairs, variables, global_step, name)
        # A copy, since identity returns a reference variable's own memory, which the step changes.
        before = [tf.raw_ops.DeepCopy(x=variable) for variable in variables]
        with tf.control_dependencies(before):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([] if stepped is None else [stepped]):
            return self._combine(variables, before)

    def _apply_some(self, pairs: Any, variables: list[Any], global_step: Any, name: Any) -> Any:
        """Take this rank's step; every N-th call combines the steps since the last combination."""
        self._remember(variables)
        first = tf.equal(tf.identity(self._counter), 0)
        began = when(first, lambda: self._copy_to_starts(variables), lambda: None)
        with tf.control_dependencies([] if began is None else [began]):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([] if stepped is None else [stepped]):
            taken = self._counter.assign((self._counter.read_value() + 1) % self._passes)
        with tf.control_dependencies([taken]):
            complete = tf.equal(self._counter.read_value(), 0)

        def combine() -> Any:
            return self._combine(variables, [start.read_value() for start in self._starts])

        return when(complete, combine, lambda: None)

    def _remember(self, variables: list[Any]) -> None:
        if self._counter is not None and belongs_to_program(self._counter):
            return
        with tf.init_scope():
            self._counter = self._local(tf.zeros([], tf.int32), "counter")
            self._starts = [
                self._local(tf.zeros(variable.shape, variable.dtype.base_dtype), f"start_{i}")
                for i, variable in enumerate(variables)
            ]

    def _local(self, initial: Any, name: str) -> Any:
        return tf.compat.v1.Variable(
            initial,
            trainable=False,
            use_resource=True,
            name=f"{self.get_name()}/{name}",
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )

    def _copy_to_starts(self, variables: list[Any]) -> Any:
        return tf.group(
            *(
                start.assign(tf.identity(variable), read_value=False)
                for start, variable in zip(self._starts, variables, strict=True)
            )
        )

    def _combine(self, variables: list[Any], before: list[Any]) -> Any:
        assigned = []
        for index, (variable, start) in enumerate(zip(variables, before, strict=True)):
            with on_device(self._device_dense):
                delta = variable.read_value() - start
                combined = allreduce(
                    delta,
                    compression=self._compression,
                    op=Adasum,
                    process_set=self._process_set,
                    name=f"{self.get_name()}/step_{index}",
                )
                assigned.append(tf.compat.v1.assign(variable, start + combined))
        return tf.group(*assigned)

    def get_slot(self, var: Any, name: str) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names()

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)
