"""Broadcasts of variables and objects: in eager mode and in sessions, and Keras' own variables."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tf_training import raised
from worlds import world_with

import perseus.tensorflow.horovod as hvd

v1 = tf.compat.v1
DTYPES = [tf.float16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.bool]


def _value(dtype: tf.DType, rank: int) -> np.ndarray:
    return ((np.arange(6).reshape(2, 3) + rank) % 3).astype(dtype.as_numpy_dtype)


def check_variables_get_the_roots_values() -> None:
    root = hvd.size() - 1
    for inplace in (False, True):
        for dtype in DTYPES:
            several = [tf.Variable(_value(dtype, hvd.rank() + i)) for i in range(3)]
            assert hvd.broadcast_variables(several, root, inplace=inplace) is None
            for i, variable in enumerate(several):
                np.testing.assert_array_equal(variable.numpy(), _value(dtype, root + i))
    assert hvd.broadcast_variables([], 0) is None


def check_keras_variables_and_seeds() -> None:
    """In Keras 3 one is Dropout's seed: uint32, which the core has no name for."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(2), tf.keras.layers.Dropout(0.5)])
    model.build((None, 3))
    assert len(model.variables) >= 2
    for root, inplace in ((0, False), (hvd.size() - 1, True)):
        for variable in model.variables:
            variable.assign(tf.cast(tf.ones(variable.shape) * (hvd.rank() + 2), variable.dtype))
        hvd.broadcast_variables(model.variables, root, inplace=inplace)
        for variable in model.variables:
            np.testing.assert_array_equal(np.asarray(variable), np.full(variable.shape, root + 2))


def check_sessions() -> None:
    for resource in (True, False):
        with tf.Graph().as_default(), v1.Session() as session:
            several = [
                v1.get_variable(
                    f"v{i}", initializer=_value(dtype, hvd.rank()), use_resource=resource
                )
                for i, dtype in enumerate(DTYPES)
            ]
            everything = hvd.broadcast_global_variables(0)
            session.run(v1.global_variables_initializer())
            session.run(everything)
            for variable, dtype in zip(session.run(several), DTYPES, strict=True):
                np.testing.assert_array_equal(variable, _value(dtype, 0))
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_variables(several, hvd.size() - 1, inplace=True))
            for variable, dtype in zip(session.run(several), DTYPES, strict=True):
                np.testing.assert_array_equal(variable, _value(dtype, hvd.size() - 1))
    message = raised(RuntimeError, lambda: hvd.broadcast_global_variables(0))
    assert "broadcast_variables" in message


def check_hook_builds_its_operation_for_each_graph() -> None:
    hook = hvd.BroadcastGlobalVariablesHook(0)
    for value in (3.0, 5.0):
        with tf.Graph().as_default():
            variable = v1.get_variable("v", initializer=value + hvd.rank())
            hook.begin()
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                hook.after_create_session(session, None)
                assert session.run(variable) == value
    assert hook.root_rank == 0


def check_objects() -> None:
    root = hvd.size() - 1
    mine = {"rank": hvd.rank(), "rows": list(range(hvd.rank() * 1000))}
    expected = {"rank": root, "rows": list(range(root * 1000))}
    assert hvd.broadcast_object(mine, root) == expected
    assert hvd.broadcast_object_fn(root, name="again")(mine) == expected
    everybody = hvd.allgather_object(mine)
    assert [entry["rank"] for entry in everybody] == list(range(hvd.size()))
    assert [len(entry["rows"]) for entry in everybody] == [1000 * r for r in range(hvd.size())]
    with tf.Graph().as_default(), v1.Session() as session:
        assert hvd.broadcast_object(mine, root, session=session) == expected
        assert len(hvd.allgather_object(mine, session=session)) == hvd.size()


def check_objects_in_a_process_set() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        members = hvd.add_process_set([hvd.size() - 1])
        if members.included():
            assert hvd.allgather_object("x", process_set=members) == ["x"]
            assert hvd.broadcast_object("y", hvd.size() - 1, process_set=members) == "y"
        hvd.remove_process_set(members)


def check_references() -> None:
    variable, other = tf.Variable(1.0), tf.Variable(2.0)
    references = hvd.vars_to_refs([variable, [other]])
    assert references == (variable.ref(), (other.ref(),))
    back = hvd.refs_to_vars(references)
    assert back[0] is variable
    assert back[1][0] is other
