"""DistributedOptimizer for Keras 2: an optimizer of the same class that computes reduced gradients.

Both kinds of Keras 2: optimizers.Optimizer and optimizers.legacy.Optimizer. Source of behaviour:
Horovod 0.28.1, horovod._keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.elastic.variables_state import optimizer_variables
from perseus.gradients.participation import sums_over_steps
from perseus.keras import jit
from perseus.keras.copies import copy_around, copy_of, distributed_class
from perseus.keras.library import keras
from perseus.keras.reducer import GradientReducer, Options, Reducing
from perseus.keras.residuals import SavedResiduals
from perseus.tensorflow.gradient_aggregation import count_step
from perseus.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from perseus.tensorflow.modes import when
from perseus.tensorflow.residuals import ResidualState
from perseus.tensorflow.verdicts import Verdicts

# Attributes that the config lacks: those that methods set, and arguments that Keras leaves out.
_NOT_IN_CONFIG = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "adaptive_epsilon",
    "gradient_aggregator",
    "gradient_transformers",
)
_CHILD = "perseus_residuals_state"  # in TensorFlow's checkpoints

# At import: model.compile(hvd.DistributedOptimizer(…)) looks up compile before it wraps.
jit.install()


class _Places:
    """The variables of one step by their position, as Keras 3's optimizers know theirs."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._trainable_variables_indices = {
            self._var_key(variable): index for index, variable in enumerate(variables)
        }

    def _var_key(self, variable: Any) -> Any:
        return variable._unique_id

    def _get_variable_index(self, variable: Any) -> int:
        return self._trainable_variables_indices[self._var_key(variable)]


class _AggregationHelper(LocalGradientAggregationHelperEager):
    """Sums of several passes, which travel by the optimizer's reducer."""

    def __init__(self, reducer: GradientReducer) -> None:
        options, plan = reducer.options, reducer.plan
        super().__init__(
            options.passes,
            lambda grads, variables: self.reduce(grads, variables)[0],
            plan.sparse_as_dense,
            options.average_passes,
            plan.process_set,
            options.scale_local_gradients,
        )
        self._reducer = reducer
        self.learning_rate: Any = None  # of the step that is being taken

    @property
    def applies(self) -> Any:
        """Whether to apply the gradients of the last pass; see LocalGradientAggregationHelper."""
        return self._verdicts.last

    def _variable(self, initial: Any, name: str) -> Any:
        made = super()._variable(initial, name)
        # In a graph Keras initialises what it knows.
        keras.__internal__.backend.track_variable(made)
        return made

    def reduce(self, grads: list[Any], vars: list[Any]) -> tuple[list[Any], Any]:
        """As the reducer says."""
        if not self._reducer.active():
            return grads, None
        return self._reducer.reduce(grads, vars, _Places(vars), self.learning_rate)


class DistributedMixin(Reducing):
    """The mixin that is put in front of an optimizer's class."""

    _agg_helper: _AggregationHelper | None
    _verdicts: Verdicts
    _reduces_later: bool  # the gradients that apply_gradients gets next
    _steps_now: bool  # within minimize()
    _state: tuple[Any, ...]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.perseus_residuals = SavedResiduals(self._reducer)
        # Not by assignment, which would make it a part of every checkpoint.
        self.__dict__[_CHILD] = ResidualState(self._reducer)
        self._agg_helper = _AggregationHelper(self._reducer) if self._options.passes > 1 else None
        self._verdicts = Verdicts()
        self._reduces_later = self._steps_now = False
        self._state = ()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """As in the wrapped optimizer, with the held-back values, if any."""
        wrapped: Any = super()
        children: dict[str, Any] = wrapped._trackable_children(save_type, **kwargs)
        held = save_type == "checkpoint" and basics.is_initialized() and self._reducer.residuals()
        return {**children, _CHILD: self.__dict__[_CHILD]} if held else children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        wrapped: Any = super()
        if name == _CHILD:
            return self.__dict__[_CHILD]
        return wrapped._lookup_dependency(name, cached_dependencies)

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """As in the wrapped optimizer, with gradients that are reduced over all ranks."""
        wrapped: Any = super()
        self._steps_now = True
        try:
            return wrapped.minimize(*args, **kwargs)
        finally:
            self._steps_now = False

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """As in the wrapped optimizer, the gradients being reduced over all ranks."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The same under the name that legacy optimizers have for it."""
        wrapped: Any = super()
        if hasattr(wrapped, "_compute_gradients"):
            pairs = wrapped._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = wrapped.compute_gradients(loss, var_list, tape=tape)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return list(zip(self._begin(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """As in the wrapped optimizer, reduced over all ranks; for graphs."""
        wrapped: Any = super()
        return self._begin(wrapped.get_gradients(loss, params), params)

    def _begin(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Reduced gradients; inside a LossScaleOptimizer they are still this rank's.

        What it applies is finite and has no scale, which may be another one in every step: only
        that may be summed up over steps and held back.
        """
        if not getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            return self._allreduce(grads, vars, self._steps_now)
        self._reduces_later = True
        return _finite_everywhere(grads, self._reducer)

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any], steps: bool) -> list[Any]:
        """Return reduced gradients. steps: all ranks apply them right afterwards."""
        grads, vars = list(grads), list(vars)
        if self._reducer.active():
            self._check_clipping(vars)
        rate = None if self._state else self._rate()
        if self._agg_helper is not None:
            self._agg_helper.learning_rate = rate
            grads = self._agg_helper.compute_gradients(grads, vars)
            applies = self._agg_helper.applies
        elif not self._reducer.active():
            return grads
        else:
            grads, applies = self._reducer.reduce(grads, vars, _Places(vars), rate)
            self._verdicts.give(zip(grads, vars, strict=True), applies)
        if not steps and self._reducer.rotates():  # a rank may leave out the step, not the turn
            turn = partial(self._take_turn, grads, vars)
            when(tf.constant(True) if applies is None else applies, turn, lambda: None)
        return grads

    def _take_turn(self, grads: Sequence[Any], vars: Sequence[Any]) -> None:
        if self._reducer.rotates():
            self._reducer.take_turn(grads, vars, _Places(vars))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the wrapped optimizer: compute_gradients reduces, unless losses are scaled.

        While PERSEUS_ACCUMULATE_N_STEPS or backward_passes_per_step sums up, only `iterations`
        advances; if a NaN is to be skipped, no rank calls it.
        """
        wrapped: Any = super()
        pairs = list(grads_and_vars)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        steps = self._steps_now or self._reduces_later
        if self._reduces_later:
            self._reduces_later = False
            gradients = self._allreduce(gradients, variables, steps)
            pairs = list(zip(gradients, variables, strict=True))

        def apply() -> Any:
            result = wrapped.apply_gradients(pairs, *args, **kwargs)
            if steps:
                self._take_turn(gradients, variables)
            return result

        with tf.init_scope():
            _ = self.iterations  # type: ignore[attr-defined]  # legacy ones make it now
        if self._agg_helper is not None:
            return self._agg_helper.apply_gradients(apply, self, pairs)
        applies = self._verdicts.on(pairs)
        if applies is None:
            return apply()
        # Schedules of the learning rate count calls, as without the sums.
        otherwise = partial(count_step, self, None) if sums_over_steps() else lambda: None
        return when(applies, apply, otherwise)

    def _take_over(self) -> None:
        """Go on where the wrapped optimizer was, now that there are variables."""
        values, self._state = self._state, ()
        if values:
            keras.backend.batch_set_value(list(zip(optimizer_variables(self), values, strict=True)))


class _Current(DistributedMixin):
    """Of optimizers.Optimizer."""

    def build(self, var_list: Any) -> None:
        """As in the wrapped optimizer."""
        super().build(var_list)  # type: ignore[misc]
        self._take_over()


class _Legacy(DistributedMixin):
    """Of optimizers.legacy.Optimizer, which has another name for build()."""

    def _create_all_weights(self, var_list: Any) -> None:
        super()._create_all_weights(var_list)  # type: ignore[misc]
        self._take_over()


def _finite_everywhere(grads: Sequence[Any], reducer: GradientReducer) -> list[Any]:
    """The gradients; NaN instead if some rank has one that is not finite.

    So LossScaleOptimizers, each of which sees only its own rank's gradients, skip the same steps.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    if not values or not reducer.active():
        return list(grads)
    here = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    finite = reducer.everywhere(here)

    def marked(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = marked(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return (
            None if gradient is None else tf.where(finite, gradient, tf.cast(nan, gradient.dtype))
        )

    return [marked(gradient) for gradient in grads]


def distribute(optimizer: Any, options: Options) -> Any:
    """A distributed optimizer of the class, with the options and the state of `optimizer`.

    A LossScaleOptimizer stays one, around a distributed one.
    """
    wrapped = type(optimizer)
    if not (tf.executing_eagerly() or isinstance(optimizer, keras.optimizers.legacy.Optimizer)):
        raise NotImplementedError(
            f"[keras] without eager execution Keras 2 trains with its legacy optimizers only: use "
            f"keras.optimizers.legacy.{wrapped.__name__}"
        )
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        return copy_around(optimizer, distribute(optimizer.inner_optimizer, options))
    mixin = _Current if hasattr(wrapped, "build") else _Legacy
    made = copy_of(optimizer, distributed_class(mixin, wrapped, options), _NOT_IN_CONFIG)
    if getattr(optimizer, "_built", False) or getattr(optimizer, "_hypers_created", False):
        made._state = tuple(keras.backend.batch_get_value(optimizer_variables(optimizer)))
    return made
