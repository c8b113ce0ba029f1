"""perseus.tensorflow.horovod against horovod.tensorflow: every name, parameter and default."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from horovod_face import Face

import perseus.tensorflow
import perseus.tensorflow.horovod as hvd
from perseus.tensorflow import gradient_aggregation, gradient_aggregation_eager, mpi_ops
from perseus.tensorflow.data import compute_service, compute_worker

FACE = Face(
    hvd,
    "horovod_tensorflow_api.json",
    extra={
        "gradient": ["unconnected_gradients"],
        "DistributedOptimizer": ["residuals"],
        "DistributedGradientTape": ["residuals"],
        "PartialDistributedGradientTape": ["residuals"],
    },
    compressing={
        "DistributedOptimizer",
        "DistributedGradientTape",
        "PartialDistributedGradientTape",
    },
)
MODULES = {
    "data.compute_service": compute_service,
    "data.compute_worker": compute_worker,
    "gradient_aggregation": gradient_aggregation,
    "gradient_aggregation_eager": gradient_aggregation_eager,
}


def test_names():
    FACE.expect_names()
    FACE.expect_same_names(perseus.tensorflow)
    assert perseus.tensorflow.elastic is hvd.elastic
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = perseus.tensorflow.nothing


def test_names_that_scripts_use_although_they_begin_with_an_underscore():
    for name in ("_allreduce", "_grouped_allreduce", "_reducescatter", "_grouped_reducescatter"):
        assert getattr(hvd, name) is getattr(mpi_ops, name)
    assert hvd._LegacyOptimizer is tf.compat.v1.train.Optimizer
    made = hvd.DistributedOptimizer.__globals__["_DistributedOptimizer"]
    assert hvd._DistributedOptimizer is made
    horovods = FACE.names["DistributedOptimizer"]["instance_methods"]["__init__"]
    FACE.expect_parameters("DistributedOptimizer", hvd._DistributedOptimizer, horovods)
    # Horovod's has no defaults; scripts for its earlier versions give fewer arguments.
    horovods = (
        "name, device_dense, device_sparse, compression, sparse_as_dense, op=Average, "
        "gradient_predivide_factor=1.0, groups=None, process_set=global_process_set"
    )
    FACE.expect_parameters("", hvd._make_allreduce_grads_fn, horovods)


def test_package_alone_loads_no_face():
    # Keras, and what compiles the XLA library, import modules of it.
    code = "import sys, perseus.tensorflow; sys.exit('perseus.tensorflow.horovod' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("name", FACE.functions)
def test_function_is_horovods(name):
    FACE.expect_function(name)


def test_constants_and_modules():
    FACE.expect_constants_and_modules()


@pytest.mark.parametrize(
    "class_name",
    ["BroadcastGlobalVariablesHook", "LocalGradientAggregationHelper", "ProcessSet"],
)
def test_class_has_horovods_methods(class_name):
    FACE.expect_methods(class_name)


def test_sync_batch_normalization():
    parameters = inspect.signature(hvd.SyncBatchNormalization).parameters
    assert list(parameters) == ["fused", "kwargs"]
    assert parameters["fused"].default is False
    assert issubclass(hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_behind_the_face(module):
    for name, facts in FACE.facts["modules"][module].items():
        made = getattr(MODULES[module], name)
        if facts["kind"] in ("function", "contextmanager"):
            FACE.expect_parameters(name, made, facts["params"])
        for method, parameters in facts.get("methods", {}).items():
            FACE.expect_parameters(method, getattr(made, method), parameters)


def test_helpers_attributes():
    helper = hvd.LocalGradientAggregationHelper(2, None, False, True, 0, "optimizer_type_keras")
    for name in FACE.names["LocalGradientAggregationHelper"]["instance_attributes"]:
        assert hasattr(helper, name), name
    eager = gradient_aggregation_eager.LocalGradientAggregationHelperEager(2, None, False, True)
    facts = FACE.facts["modules"]["gradient_aggregation_eager"][
        "LocalGradientAggregationHelperEager"
    ]
    for name in facts["instance_attributes"]:
        assert hasattr(eager, name), name


def test_compressors():
    FACE.expect_compressors()


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("world")
def test_what_the_factories_make():
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    for name, made in (
        ("DistributedOptimizer", hvd.DistributedOptimizer(optimizer)),
        ("DistributedGradientTape", hvd.DistributedGradientTape(tf.GradientTape())),
    ):
        facts = FACE.names[name]
        for method, parameters in facts["instance_methods"].items():
            if method != "__init__":  # made by the factory
                FACE.expect_parameters(method, getattr(made, method), parameters)
        for attribute in facts["instance_attributes"]:
            assert hasattr(made, attribute), attribute
