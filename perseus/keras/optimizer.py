"""DistributedOptimizer for Keras 3: an optimizer of the same class that averages gradients first.

Source of behaviour: Horovod 0.28.1, horovod._keras, in the terms of Keras 3: one method, `apply`,
is reached by every way of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from perseus.keras import jit, loss_scale
from perseus.keras.backend import backend
from perseus.keras.gradient_aggregation import GradientAggregation
from perseus.keras.reducer import Options, Reducing
from perseus.keras.residuals import SavedResiduals

# What is said by calling methods, and so is in no config.
_CALLED_FOR = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


class DistributedMixin(Reducing):
    """What is put in front of an optimizer's class."""

    _agg_helper: GradientAggregation | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.perseus_residuals = SavedResiduals(self._reducer)
        passes, average = self._options.passes, self._options.average_passes
        self._agg_helper = GradientAggregation(passes, average) if passes > 1 else None

    def build(self, variables: Sequence[Any]) -> None:
        """As in the wrapped optimizer."""
        super().build(variables)  # type: ignore[misc]
        if self._agg_helper is not None:
            self._agg_helper.build(variables)

    def scale_loss(self, loss: Any) -> Any:
        """As in the wrapped optimizer; Keras' train_step calls it right before backward."""
        sums_up = self._agg_helper is not None or self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if not sums_up and self._reducer.active():
            self._reducer.before_backward(self)
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average gradients over all ranks and apply them.

        With gradient_accumulation_steps or backward_passes_per_step they travel when all are there.
        While PERSEUS_ACCUMULATE_N_STEPS sums up, and where a NaN is to be skipped, on all ranks
        alike, the wrapped optimizer is left alone.
        """
        optimizer: Any = self
        if not grads or not self._reducer.active() or not _ready(optimizer, trainable_variables):
            self._apply_local(grads, trainable_variables)
            return
        variables = list(trainable_variables or optimizer._trainable_variables)
        grads = list(grads)
        if self._agg_helper is not None:
            self._apply_aggregated(grads, variables)
        elif optimizer.gradient_accumulation_steps:
            self._apply_accumulated(grads, variables)
        else:
            grads, applies = self._reducer.reduce(grads, variables, self)
            self._apply_where(applies, grads, variables)

    def _apply_local(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        super().apply(grads, variables)  # type: ignore[misc]

    def _apply_where(
        self,
        applies: Any,
        grads: Sequence[Any],
        variables: Sequence[Any],
        otherwise: Callable[[], Any] = lambda: None,
    ) -> None:
        """Apply reduced gradients if they may be."""
        if applies is None:
            self._apply_local(grads, variables)
        else:
            keras.ops.cond(applies, lambda: self._apply_local(grads, variables), otherwise)

    def _count(self) -> None:
        """Count a call without a step, as Keras and Horovod do."""
        optimizer: Any = self
        optimizer._iterations.assign_add(1)

    def _apply_aggregated(self, grads: list[Any], variables: list[Any]) -> None:
        """Horovod's backward_passes_per_step."""
        assert self._agg_helper is not None
        indices = [self._get_variable_index(variable) for variable in variables]  # type: ignore[attr-defined]

        def step(totals: list[Any]) -> None:
            reduced, applies = self._reducer.reduce(totals, variables, self)
            self._apply_where(applies, reduced, variables, self._count)

        self._agg_helper.add_call(grads, indices, step, self._count)

    def _apply_accumulated(self, grads: list[Any], variables: list[Any]) -> None:
        """Keras's gradient_accumulation_steps, whose sums are the wrapped optimizer's variables.

        In the last call of a step they are taken, reduced and given to the wrapped optimizer in the
        place of that call's gradients; it finds nothing to add.
        """
        optimizer: Any = self
        steps = optimizer.gradient_accumulation_steps
        sums = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
            for variable in variables
        ]

        def step() -> None:
            taken: list[Any] = []
            for gradient, total in zip(grads, sums, strict=True):
                if gradient is None:
                    taken.append(None)
                    continue
                taken.append(keras.ops.add(backend.dense(gradient), total))
                total.assign(keras.ops.zeros(total.shape, total.dtype))
            reduced, applies = self._reducer.reduce(taken, variables, self)
            self._apply_where(applies, reduced, variables, self._count)

        due = keras.ops.equal((optimizer._iterations + 1) % steps, 0)
        keras.ops.cond(due, step, lambda: self._apply_local(grads, variables))


def _ready(optimizer: Any, variables: Sequence[Any] | None) -> bool:
    """Build an optimizer for variables; False where the wrapped one has an error to raise."""
    if not optimizer.built and variables is not None:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    return bool(optimizer.built)


def distribute(optimizer: Any, options: Options) -> Any:
    """A distributed optimizer of the class, with the options and the state of `optimizer`.

    A LossScaleOptimizer stays one, around a distributed one.
    """
    loss_scale.install()
    jit.install()
    made = _without_state(optimizer, options)
    if optimizer.built:
        _ready(made, optimizer._trainable_variables)
    for mine, original in zip(made.variables, optimizer.variables, strict=True):
        mine.assign(original)
    return made


def _without_state(optimizer: Any, options: Options) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        made = type(optimizer).from_config(optimizer.get_config())
        made.inner_optimizer = _without_state(optimizer.inner_optimizer, options)
        return made
    wrapped = type(optimizer)
    # Saved models name the class they need: one that is there without Perseus, too.
    copied = {"__module__": wrapped.__module__, "__qualname__": wrapped.__qualname__}
    made_class: Any = type(
        wrapped.__name__, (DistributedMixin, wrapped), {**copied, "_options": options}
    )
    made = made_class.from_config(optimizer.get_config())
    for name in _CALLED_FOR:
        if hasattr(optimizer, name):
            setattr(made, name, getattr(optimizer, name))
    return made
