"""jit_compile: what works under XLA, and what is said where something does not."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tf_training import raised

import perseus.tensorflow.horovod as hvd
import perseus.tensorflow.horovod.keras as hvd_keras

REFUSED = "pass jit_compile=False, to tf.function or to Keras' Model.compile"


def check_ops_refuse_functions_that_xla_compiles() -> None:
    ones = tf.ones([3])
    for name, function in {
        "perseus_allreduce": lambda: hvd.allreduce(ones),
        "perseus_allgather": lambda: hvd.allgather(ones),
        "perseus_broadcast": lambda: hvd.broadcast(ones, 0),
        "perseus_alltoall": lambda: hvd.alltoall(tf.ones([4])),
        "perseus_reducescatter": lambda: hvd.reducescatter(tf.ones([4])),
        "perseus_size": hvd.size_op,
    }.items():
        plain = tf.function(function)
        compiled = tf.function(function, jit_compile=True)
        around = tf.function(plain, jit_compile=True)
        for refused in (compiled, around, tf.function(compiled)):
            message = raised(NotImplementedError, refused)
            assert name in message, message
            assert REFUSED in message, message


def _model(**arguments: object) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **arguments)
    return model


def _fit(model: keras.Model) -> None:
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(8, 4)).astype("float32")
    model.fit(inputs, inputs[:, :2], batch_size=4, verbose=0)


def check_keras_says_what_to_do_about_jit_compile() -> None:
    assert REFUSED in raised(NotImplementedError, lambda: _fit(_model(jit_compile=True)))
    _fit(_model(jit_compile=False))


def check_auto_asks_for_no_xla() -> None:
    for compiled in (_model(jit_compile="auto"), _model()):
        assert not compiled.jit_compile
        _fit(compiled)


def check_keras_chooses_no_xla_by_itself() -> None:
    if keras.__version__.startswith("2."):
        return  # it has no "auto"
    gpu = mock.Mock(device_type="GPU")
    with mock.patch.object(tf.config, "list_physical_devices", lambda *_: [gpu]):
        local = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        local.compile("sgd", "mse")
        assert local.jit_compile
        for precision in ("float32", "mixed_float16"):
            keras.mixed_precision.set_global_policy(precision)
            model = _model()
            assert not model.jit_compile
    keras.mixed_precision.set_global_policy("float32")
    _fit(model)
    _fit(_model())
