"""DistributedOptimizer for Keras 3: an optimizer of the same class that averages gradients first.

In Keras 3, every way of training calls the optimizer's method `apply`, so only that is overridden.
Belongs to the thread that trains. Source of behaviour: Horovod 0.28.1, horovod._keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from perseus.gradients.participation import sums_over_steps
from perseus.keras import jit, loss_scale
from perseus.keras.backend import backend
from perseus.keras.copies import (
    COPIES_ARE_LOADED,
    copy_around,
    copy_of,
    copy_with_inner,
    distributed_class,
    loaded_copy,
)
from perseus.keras.gradient_aggregation import GradientAggregation
from perseus.keras.nesting import with_inner
from perseus.keras.reducer import Options, Reducing, is_overwritten
from perseus.keras.residuals import SavedResiduals

_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())  # older Keras 3 has none
# Attributes that methods of an optimizer set, and that its config therefore lacks.
_NOT_IN_CONFIG = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


class DistributedMixin(Reducing):
    """The mixin that distribute() puts in front of the wrapped optimizer's class."""

    _agg_helper: GradientAggregation | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.perseus_residuals = SavedResiduals(self._reducer)
        passes, average = self._options.passes, self._options.average_passes
        self._agg_helper = GradientAggregation(passes, average) if passes > 1 else None

    if COPIES_ARE_LOADED:  # by the name of the wrapped class, and therefore not distributed

        def __copy__(self) -> Any:
            return self.distribute_alike(loaded_copy(self))

        def __deepcopy__(self, memo: Any) -> Any:
            return self.__copy__()

    def distribute_alike(self, optimizer: Any) -> Any:
        """Return an optimizer made distributed with the options of this one."""
        made = distribute(optimizer, self._options)
        for variable in self._reducer.local.registered():
            getattr(made, "inner_optimizer", made).register_local_var(variable)
        return made

    def build(self, variables: Sequence[Any]) -> None:
        """As in the wrapped optimizer."""
        super().build(variables)  # type: ignore[misc]
        # By now the function of a MultiOptimizer has chosen its inner optimizers.
        _check_passes(self, self._options)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the wrapped optimizer does.

        Keras' train_step calls it right before backward, so the reducer can prepare for backward.
        """
        accumulates = self._agg_helper is not None or self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if not accumulates and self._reducer.active():
            self._reducer.before_backward(self, self._rate)
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average gradients over all ranks and apply them.

        With gradient_accumulation_steps or backward_passes_per_step, only the sums of all passes
        are reduced. While PERSEUS_ACCUMULATE_N_STEPS sums gradients, or if a NaN is to be skipped,
        no rank calls the wrapped optimizer; calls that only sum advance `iterations`.
        """
        optimizer: Any = self
        acts = self._reducer.active() or self._agg_helper is not None
        if not grads or not acts or not _ready(optimizer, trainable_variables):
            self._apply_local(grads, trainable_variables)
            return
        variables = list(trainable_variables or optimizer._trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"[keras] apply() got {len(grads)} gradients for {len(variables)} variables"
            )
        optimizer._check_variables_are_known(variables)
        if self._reducer.active():
            self._check_clipping(variables)
        grads = list(grads)
        if self._agg_helper is not None:
            self._apply_aggregated(grads, variables)
        elif optimizer.gradient_accumulation_steps:
            self._apply_accumulated(grads, variables)
        else:
            grads, applies = self._reducer.reduce(grads, variables, self, self._rate())
            # Schedules of the learning rate count calls, as without the sums.
            otherwise = self._count if sums_over_steps() else lambda: None
            self._apply_where(applies, grads, variables, otherwise)

    def _apply_local(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        super().apply(grads, variables)  # type: ignore[misc]

    def _apply_where(
        self,
        applies: Any,
        grads: Sequence[Any],
        variables: Sequence[Any],
        otherwise: Callable[[], Any] = lambda: None,
    ) -> None:
        """Apply reduced gradients if `applies` is true or None; else call otherwise()."""

        def apply() -> None:
            self._apply_local(grads, variables)
            self._reducer.take_turn(grads, variables, self)

        if applies is None:
            apply()
        else:
            keras.ops.cond(applies, apply, otherwise)

    def _count(self) -> None:
        """Count a call that takes no step, as Keras and Horovod do.

        Keras begins its moving averages of variables (use_ema) only while nothing is counted.
        """
        for optimizer in with_inner(self):
            if not optimizer.built:  # an inner one without variables
                continue
            if optimizer.use_ema:
                begins = keras.ops.equal(optimizer._iterations, 0)
                keras.ops.cond(begins, partial(_seed, optimizer), lambda: None)
            optimizer._iterations.assign_add(1)

    def _apply_aggregated(self, grads: list[Any], variables: list[Any]) -> None:
        """Apply gradients with Horovod's backward_passes_per_step."""
        assert self._agg_helper is not None
        indices = [self._get_variable_index(variable) for variable in variables]  # type: ignore[attr-defined]

        def step(totals: list[Any]) -> None:
            reduced, applies = totals, None
            # Passes also make one step on a rank that trains alone, so a script does not change.
            if self._reducer.active():
                reduced, applies = self._reducer.reduce(totals, variables, self, self._rate())
            self._apply_where(applies, reduced, variables, self._count)

        self._agg_helper.add_call(grads, variables, indices, step, self._count)

    def _apply_accumulated(self, grads: list[Any], variables: list[Any]) -> None:
        """Apply gradients with Keras' gradient_accumulation_steps.

        The sums are variables of the wrapped optimizer. The last call of a step reduces them
        together with its own gradients, sets them to zeros, and passes the result to the wrapped
        optimizer, which thus adds it to zeros.
        """
        optimizer: Any = self
        steps = optimizer.gradient_accumulation_steps
        # Keras divides gradients by it before it adds them to the sums, and the result again.
        scale = optimizer.loss_scale_factor or 1.0
        sums = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
            for variable in variables
        ]

        def step() -> None:
            taken: list[Any] = []
            for gradient, total, variable in zip(grads, sums, variables, strict=True):
                if gradient is None:
                    taken.append(None)
                    continue
                if is_overwritten(variable):
                    taken.append(keras.ops.maximum(gradient, total))
                else:
                    taken.append(keras.ops.add(backend.dense(gradient), total * scale))
                total.assign(keras.ops.zeros(total.shape, total.dtype))
            reduced, applies = self._reducer.reduce(taken, variables, self, self._rate())
            self._apply_where(applies, reduced, variables, self._count)

        due = keras.ops.equal((optimizer._iterations + 1) % steps, 0)
        keras.ops.cond(due, step, lambda: self._apply_local(grads, variables))


def _seed(optimizer: Any) -> None:
    """Begin the moving averages with the values of the variables."""
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def _ready(optimizer: Any, variables: Sequence[Any] | None) -> bool:
    """Build an optimizer for variables if needed.

    Returns whether it is built. If it is not, the wrapped optimizer's apply() raises the error.
    """
    if not optimizer.built and variables is not None:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    return bool(optimizer.built)


def _check_passes(optimizer: Any, options: Options) -> None:
    """Raise ValueError for gradient_accumulation_steps with backward_passes_per_step.

    The wrapped optimizer would take each sum of ours for one of the gradients that it averages.
    """
    if options.passes == 1:
        return
    for each in with_inner(optimizer):
        if steps := each.gradient_accumulation_steps:
            raise ValueError(
                f"[keras] backward_passes_per_step={options.passes} for an optimizer "
                f"({each.name}) that has gradient_accumulation_steps={steps}: both sum the "
                "gradients of several calls, so use only one of the two"
            )


def distribute(optimizer: Any, options: Options) -> Any:
    """Return a distributed optimizer with the class, the config and the state of `optimizer`.

    For a LossScaleOptimizer, the result is a LossScaleOptimizer around a distributed optimizer.
    Raises ValueError for options that do not fit the optimizer.
    """
    _check_passes(optimizer, options)
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
        return copy_around(optimizer, _without_state(optimizer.inner_optimizer, options))
    made_class = distributed_class(DistributedMixin, type(optimizer), options)
    if isinstance(optimizer, _MULTI):
        return copy_with_inner(optimizer, made_class)
    return copy_of(optimizer, made_class, _NOT_IN_CONFIG)
