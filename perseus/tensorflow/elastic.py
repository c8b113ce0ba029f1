"""Elastic training with TensorFlow: states of variables and Keras models, `run` around the loop.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.tensorflow.elastic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.basics import init, rank, shutdown
from perseus.elastic import ObjectState, State, reset, run_fn
from perseus.elastic.loop import failure_if, looped
from perseus.elastic.variables_state import ModelState, VariablesState
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt
from perseus.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from perseus.tensorflow.own_variables import clear_in

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, *args, **kwargs)` elastic; used as a decorator.

    The state is made equal on all ranks, then func runs. When the world breaks, which TensorFlow
    reports as UnknownError, or func raises HorovodInternalError, all ranks go back to the last
    commit, build a new world and call it again; HostsUpdatedInterrupt does the same but keeps the
    state. Other exceptions propagate. Returns func's result. InitializationError when ranks are
    missing from the new world.
    """

    return looped(func, reset, failure_if(tf.errors.UnknownError))


def _broadcast(variables: Sequence[Any]) -> None:
    broadcast_variables(variables, root_rank=0)


class TensorFlowKerasState(ModelState):
    """A Keras model, its optimizer and plain values: `TensorFlowKerasState(model, epoch=0)`.

    model: built, or ValueError. optimizer: None = the one of compile(). backend: accepted for
    Horovod's sake. kwargs: attributes and their first values; picklable, or, for models that a
    DistributedGradientTape trains, hvd.GradientResiduals, of which every rank keeps its own.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(
            broadcast_object, basics.rank, _broadcast, model, optimizer, backend, **kwargs
        )


class TensorFlowState(VariablesState):
    """Variables and plain values: `TensorFlowState(variables, step=0)`.

    variables: None = TensorFlow 1's global variables. session: in graphs, what reads and writes
    them; None = the default session. kwargs: attributes and their first values; picklable, or
    hvd.GradientResiduals, of which every rank keeps its own.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._broadcast_all: Any = None
        super().__init__(
            broadcast_object, basics.rank, self._give_everywhere, self.variables, **kwargs
        )

    def _give_everywhere(self, variables: Sequence[Any]) -> None:
        if tf.executing_eagerly():
            _broadcast(variables)
            return
        if self._broadcast_all is None:
            self._broadcast_all = broadcast_variables(variables, root_rank=0)
        self._running().run(self._broadcast_all)

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return super()._read(variables)
        values: list[Any] = self._running().run(list(variables))
        return values

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        if tf.executing_eagerly():
            super()._write(variables, values)
            return
        for variable, value in zip(variables, values, strict=True):
            variable.load(value, self._running())

    def _forget_passes(self) -> None:
        super()._forget_passes()
        if not tf.executing_eagerly():
            clear_in(self._running())

    def _running(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("[tensorflow] TensorFlowState in a graph needs session=")
        return session
