"""What lossy codecs hold back of gradients, as a part of TensorFlow's checkpoints.

Belongs to the thread that trains.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.training.saver import BaseSaverBuilder

from perseus import basics
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import LateReducer
from perseus.gradients.residuals import Source, pack, unpack
from perseus.tensorflow.reducer import GradientReducer

_used_names: Counter[str] = Counter()


class ResidualState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What tf.train.Checkpoint saves of a source; a rank takes only what it has saved itself."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def serialize(self) -> bytes:
        """This rank's; nothing outside of a world."""
        if not basics.is_initialized():
            return pack({}, 0)
        return pack(self._source.residuals(), basics.rank())

    def deserialize(self, string_value: Any) -> None:
        """Go on with what serialize() gave; ValueError for anything else."""
        self._source.go_on_with(*unpack(getattr(string_value, "item", lambda: string_value)()))


class GradientResiduals(LateReducer, ResidualState):
    """What lossy codecs hold back of one model's gradients: `residuals=` of what reduces them.

    Of every hvd.DistributedGradientTape of the model's, which have equal arguments, or of one
    hvd.DistributedOptimizer of tf.compat.v1. It is a part of checkpoints as
    `tf.train.Checkpoint(model=model, residuals=residuals)`, of tf.compat.v1.train.Saver's by
    saveable(), and of elastic states as `TensorFlowState(variables, residuals=residuals)`. A rank
    takes only what it has saved itself; others begin with nothing.

    name: equal on all ranks and in all runs, another one for each model. While gradients have it,
        no two reductions of the same variable may be in flight, as in loops that do not assign it.
    """

    def __init__(self, name: str = "gradients") -> None:
        LateReducer.__init__(self)
        ResidualState.__init__(self, self)
        number = _used_names[name]
        _used_names[name] += 1
        self._scope = f"{name}_{number}_Allreduce" if number else f"{name}_Allreduce"

    def reducer(self, plan: Plan) -> GradientReducer:
        """The one that reduces; ValueError where another plan has been given before."""
        if self._reducer is None:
            self._reducer = GradientReducer(self._scope, plan, lasting=True)
            self.go_on_with(*self._loaded)
        elif self._reducer.plan != plan:
            raise ValueError(
                "[tensorflow] residuals= were given together with other arguments before: make a "
                "GradientResiduals for each model and each way to reduce"
            )
        made: GradientReducer = self._reducer
        return made

    def saveable(self, name: str = "perseus_residuals") -> Any:
        """What a tf.compat.v1.train.Saver of this graph takes in its list of variables.

        name: in the checkpoint. It calls Python, so it is not to be used from an exported graph.
        """
        return _Saveable(self, name)


class _Saveable(BaseSaverBuilder.SaveableObject):  # type: ignore[misc]
    def __init__(self, state: ResidualState, name: str) -> None:
        self._state = state
        tensor = tf.numpy_function(state.serialize, [], tf.string)
        spec = BaseSaverBuilder.SaveSpec(tensor, "", name, tf.string)
        super().__init__(tensor, [spec], name)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """The operation that does it."""
        (tensor,) = restored_tensors
        return tf.numpy_function(self._state.deserialize, [tensor], [])
