"""Equal state on every rank: variables and arbitrary objects.

Source of behaviour: Horovod 0.28.1, horovod.tensorflow.functions. Objects travel outside of graphs,
so that no session is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from perseus import basics, control
from perseus.arguments import checked_root
from perseus.gradients.rotation import finish_corrections
from perseus.process_sets import ProcessSet, global_process_set, group_id
from perseus.tensorflow import ops
from perseus.tensorflow.modes import on_device, tf_variable

# A dtype that the core lacks is sent as one of the same width: Keras's seeds are uint32.
_SAME_WIDTH = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
}


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with the root's; those of TensorFlow and of Keras.

    variables: equal in number, order, shapes and dtypes on all ranks. root_rank: a global rank.
    inplace: use broadcast_. In both cases values arrive in new memory, which the variables take
        over without a copy: TensorFlow 2.21 exports no way to give a kernel their own memory.

    In eager mode, returns None when it is done. In a graph, returns the operation that does it.
    """
    if not isinstance(variables, Iterable):
        raise ValueError(
            f"[tensorflow] broadcast_variables expected a list of variables, such as "
            f"model.variables, got {type(variables)}"
        )
    checked_root(root_rank, "tensorflow")
    targets = [tf_variable(variable) for variable in variables]
    for target in targets:
        if not hasattr(target, "assign"):
            raise ValueError(f"[tensorflow] broadcast_variables expected variables, got {target!r}")
    if not targets:
        return None if tf.executing_eagerly() else tf.no_op()
    if tf.executing_eagerly():
        finish_corrections()
    if inplace and not any(v.dtype.base_dtype in _SAME_WIDTH for v in targets):
        done = ops.broadcast_(targets, root_rank, "broadcast_variables", process_set=process_set)
        return None if tf.executing_eagerly() else tf.group(*done)
    values = [_travelling(tf.convert_to_tensor(variable)) for variable in targets]
    copies = ops.broadcast(
        values, root_rank, "broadcast_variables", process_set=process_set, grouped=True
    )
    assigned = [
        tf.compat.v1.assign(variable, _arrived(copy, variable.dtype.base_dtype))
        for variable, copy in zip(targets, copies, strict=True)
    ]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _travelling(value: Any) -> Any:
    dtype = _SAME_WIDTH.get(value.dtype)
    return value if dtype is None else tf.bitcast(value, dtype)


def _arrived(value: Any, dtype: tf.DType) -> Any:
    return value if value.dtype == dtype else tf.bitcast(value, dtype)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that overwrites the default graph's global variables with the root's.

    RuntimeError in eager mode, which has no such collection.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


_UNWRAPPED = (
    "[tensorflow] the optimizer is not a DistributedOptimizer: gradients are not averaged, and "
    "every rank trains a model of its own. Wrap it: optimizer = hvd.DistributedOptimizer(optimizer)"
)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Overwrites all global variables with the root's after a session was created.

    For MonitoredTrainingSession and Estimator: variables restored from rank 0's checkpoint, or
    initialised there, are then equal everywhere.

    root_rank: a global rank. device: where to put the operations; "" leaves it to TensorFlow.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device
        self._runs = 0
        self._operations = 0

    def begin(self) -> None:
        """Build the broadcast, before the graph is finished."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with on_device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        del coord
        session.run(self.bcast_op)
        self._runs = 0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Warn, once, when a graph that trains has reduced nothing in its second step."""
        del run_values
        self._runs += 1
        if self._runs > 2 or basics.rank() != 0 or basics.size() == 1:
            return
        before, self._operations = self._operations, basics.stats()["operations"]
        trains = run_context.session.graph.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP)
        if self._runs == 2 and trains and before == self._operations:
            warnings.warn(_UNWRAPPED, stacklevel=2)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere.

    obj: anything cloudpickle can write; ignored on the others. root_rank: a global rank. session:
        accepted for Horovod's sake; none is used. name: without one, ranks must pass objects of the
        same type, whose name is used.
    HorovodInternalError where the world has broken; ValueError before init().
    """
    del session
    return control.broadcast_object(obj, root_rank, name, group_id(process_set))


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """broadcast_object as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in rank order, on every rank. See broadcast_object."""
    del session
    return control.allgather_object(obj, name, group_id(process_set))
