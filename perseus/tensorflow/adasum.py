"""DistributedOptimizer(op=Adasum): every rank takes its own step, and Adasum combines the steps.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; behaviour
of Horovod 0.28.1, horovod.tensorflow.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.compression import Compressor, all_applied_here
from perseus.gradients.adasum import AdasumOfSteps
from perseus.gradients.aggregation import Passes
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow import ops, own_variables
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.modes import (
    belongs_to_program,
    on_device,
    tf_variable,
    vars_to_refs,
    when,
)
from perseus.tensorflow.ops import Adasum


class _StepReducer(Reducer, AdasumOfSteps):
    """Combines the steps of variables. scope: the prefix of the names of the reductions."""

    def __init__(self, plan: Plan, scope: str) -> None:
        super().__init__(plan)
        self._scope = scope

    def combine(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """See AdasumOfSteps."""
        with on_device(self.plan.device_dense):
            return super().combine(variables, starts)

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """See AdasumOfSteps. tf.identity would return the memory of a reference variable."""
        return [tf.raw_ops.DeepCopy(x=variable) for variable in variables]

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """See AdasumOfSteps."""
        return own_variables.after(done)

    def value(self, variable: Any) -> Any:
        """See AdasumOfSteps."""
        return variable.read_value()

    def reduce(self, steps: Iterable[Any]) -> list[Any]:
        """See AdasumOfSteps. It never returns None: an error ends the session's run."""
        return [
            self._reduce(step, f"{self._scope}/step_{index}") for index, step in enumerate(steps)
        ]

    def _reduce(self, step: Any, name: str) -> Any:
        plan = self.plan
        sent, context = plan.compression.compress(step)
        (output,), _ = ops.allreduce(
            [sent], name, op=plan.op, process_set=plan.process_set, gradient_of=self.number
        )
        return plan.compression.decompress(output, context)

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> Any:
        """See AdasumOfSteps."""
        pairs = zip(variables, values, strict=True)
        return tf.group(*(tf.compat.v1.assign(variable, value) for variable, value in pairs))


class _OwnSteps(Passes):
    """Counts the steps of some variables that a rank takes alone.

    variables: all of them. starts: the values before the first step; the optimizer creates them.
    """

    def __init__(self, number: int, variables: list[Any]) -> None:
        super().__init__(number, own_variables.OwnVariables())
        self.variables = variables
        self.starts: list[Any] = []

    def take_back(self) -> None:
        """See Passes. Sessions keep both the steps and their count."""
        if self.counter is None or hasattr(self.counter, "graph"):
            return
        with tf.init_scope():
            if not bool(self.begins()):
                _copy(self.starts, self.variables)


class AdasumOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A tf.compat.v1 optimizer that wraps another one and combines its steps over all ranks.

    backward_passes_per_step: how many steps a rank takes alone before they are combined. Steps of
        other variables are counted on their own.

    Raises ValueError if the settings skip steps with a NaN: it is found after a rank's own step.
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
        if basics.skips_nan_gradients():
            raise ValueError(
                "[tensorflow] PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip cannot undo the steps that "
                "op=Adasum combines: use report or raise"
            )
        name = name or f"DistributedDelta{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        plan = Plan(Adasum, all_applied_here(compression), process_set, device_dense=device_dense)
        self._reducer = _StepReducer(plan, self.get_name())
        self._backward_passes = backward_passes_per_step
        self._passes: dict[Any, _OwnSteps] = {}  # by references to the variables

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped optimizer's gradients, because Adasum reduces steps instead."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take the wrapped optimizer's step; every N-th call combines the steps of all ranks."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        variables = [tf_variable(variable) for gradient, variable in pairs if gradient is not None]
        if self._backward_passes > 1:
            return self._apply_some(pairs, variables, global_step, name)
        return self._reducer.around(
            variables,
            lambda: self._optimizer.apply_gradients(pairs, global_step=global_step, name=name),
        )[1]

    def _apply_some(self, pairs: Any, variables: list[Any], global_step: Any, name: Any) -> Any:
        """Take this rank's step; every N-th call combines the steps since the last combination."""
        passes = self._passes_of(variables)
        began = when(passes.begins(), lambda: _copy(variables, passes.starts), lambda: None)
        with own_variables.after([began]):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with own_variables.after([stepped]):
            complete = passes.count()

        def combine() -> Any:
            starts = [start.read_value() for start in passes.starts]
            return self._reducer.combine(variables, starts)

        return when(complete, combine, lambda: None)

    def _passes_of(self, variables: list[Any]) -> _OwnSteps:
        """Return the passes of exactly these variables."""
        key = vars_to_refs(variables)
        if key in self._passes and belongs_to_program(self._passes[key].counter):
            return self._passes[key]
        passes = _OwnSteps(self._backward_passes, variables)
        with tf.init_scope():
            passes.counter = self._local(tf.zeros([], tf.int32), "counter")
            passes.starts = [
                self._local(tf.zeros(variable.shape, variable.dtype.base_dtype), f"start_{i}")
                for i, variable in enumerate(variables)
            ]
        self._passes[key] = passes
        return passes

    def _local(self, initial: Any, name: str) -> Any:
        return own_variables.make(initial, f"{self.get_name()}/{name}")

    def get_slot(self, var: Any, name: str) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.get_slot_names()

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def _copy(variables: list[Any], into: list[Any]) -> Any:
    """Assign the values of variables to others."""
    return tf.group(
        *(
            other.assign(tf.identity(variable), read_value=False)
            for other, variable in zip(into, variables, strict=True)
        )
    )
