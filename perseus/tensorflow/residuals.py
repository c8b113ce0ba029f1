"""Saves the residuals of lossy codecs in TensorFlow's checkpoints.

Belongs to the thread that trains.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.training.saver import BaseSaverBuilder

from perseus import basics
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import LateReducer
from perseus.gradients.residuals import Source, pack, unpack
from perseus.gradients.scopes import Scope
from perseus.tensorflow.reducer import GradientReducer


class ResidualState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The state that tf.train.Checkpoint saves; a rank restores only what it saved itself."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def serialize(self) -> bytes:
        """Return this rank's residuals; none if Perseus is not initialised."""
        if not basics.is_initialized():
            return pack({}, 0)
        return pack(self._source.residuals(), basics.rank())

    def deserialize(self, string_value: Any) -> None:
        """Restore the result of serialize(). Raises ValueError for anything else."""
        self._source.go_on_with(*unpack(getattr(string_value, "item", lambda: string_value)()))


class GradientResiduals(LateReducer, ResidualState):
    """The residuals of one model's gradients: the `residuals=` of what reduces them.

    They belong to all of the model's hvd.DistributedGradientTapes, which must have equal arguments,
    or to one hvd.DistributedOptimizer of tf.compat.v1. They become a part of checkpoints by
    `tf.train.Checkpoint(model=model, residuals=residuals)`, of tf.compat.v1.train.Saver's by
    saveable(), and of elastic states as `TensorFlowState(variables, residuals=residuals)`. A rank
    restores only what it saved itself; other ranks begin without residuals.

    name: equal on all ranks and in all runs, and different for each model. No two reductions of the
        same variable may be in flight under it, as in loops that do not assign the variable.
    """

    def __init__(self, name: str = "gradients") -> None:
        LateReducer.__init__(self)
        ResidualState.__init__(self, self)
        self._name = name

    def reducer(self, plan: Plan) -> GradientReducer:
        """Return the reducer. Raises ValueError if an earlier call had another plan."""
        if self._reducer is None:
            scope = Scope(f"{self._name}_Allreduce", plan.process_set)
            self._reducer = GradientReducer(scope, plan, lasting=True)
            self.go_on_with(*self._loaded)
        elif self._reducer.plan != plan:
            raise ValueError(
                "[tensorflow] residuals= were given together with other arguments before: make a "
                "GradientResiduals for each model and each way to reduce"
            )
        made: GradientReducer = self._reducer
        return made

    def saveable(self, name: str = "perseus_residuals") -> Any:
        """Return the object for the list of variables of a tf.compat.v1.train.Saver of this graph.

        name: its name in the checkpoint. It calls Python, so exported graphs cannot use it.
        """
        return _Saveable(self, name)


class _Saveable(BaseSaverBuilder.SaveableObject):  # type: ignore[misc]
    def __init__(self, state: ResidualState, name: str) -> None:
        self._state = state
        tensor = tf.numpy_function(state.serialize, [], tf.string)
        spec = BaseSaverBuilder.SaveSpec(tensor, "", name, tf.string)
        super().__init__(tensor, [spec], name)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Return the operation that restores the residuals."""
        (tensor,) = restored_tensors
        return tf.numpy_function(self._state.deserialize, [tensor], [])
