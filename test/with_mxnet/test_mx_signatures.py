"""perseus.mxnet against horovod.mxnet: every name, parameter and default."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("mxnet")

import mxnet as mx
import numpy as np
from horovod_face import Face

import perseus.mxnet as hvd

FACE = Face(
    hvd,
    "horovod_mxnet_api.json",
    extra={},
    compressing={"__init__"},
)
CLASSES = ["DistributedOptimizer", "DistributedTrainer", "ProcessSet"]


def test_names():
    FACE.expect_names()


@pytest.mark.parametrize("name", [name for name in FACE.functions if name != "init"])
def test_function_is_horovods(name):
    FACE.expect_function(name)


def test_constants_and_modules():
    FACE.expect_constants_and_modules()


# Horovod's takes *args and **kwargs.
def test_init_has_its_parameters_written_out():
    assert list(inspect.signature(hvd.init).parameters) == ["comm", "process_sets"]


@pytest.mark.parametrize("class_name", CLASSES)
def test_class_has_horovods_methods(class_name):
    FACE.expect_methods(class_name)


def test_classes_are_mxnets():
    assert issubclass(hvd.DistributedOptimizer, mx.optimizer.Optimizer)
    assert issubclass(hvd.DistributedTrainer, mx.gluon.Trainer)


@pytest.mark.parametrize("module", sorted(FACE.facts["modules"]))
def test_modules_have_horovods_operations(module):
    for name, facts in FACE.facts["modules"][module].items():
        found = getattr(getattr(hvd, module), name, None)
        if name in FACE.names:
            assert found is getattr(hvd, name), name
        elif facts["kind"] == "function":
            FACE.expect_parameters(name, found, facts["params"])


def test_compressors():
    FACE.expect_compressors()


def test_compressors_by_themselves():
    values = mx.nd.array([1.5, -2.25])
    for name, dtype in (("fp16", np.float16), ("bf16", [("bfloat16", "<u2")])):
        compressor = getattr(hvd.Compression, name)
        sent, context = compressor.compress(values)
        assert np.dtype(sent.dtype) == np.dtype(dtype)
        assert compressor.decompress(sent, context).asnumpy().tolist() == [1.5, -2.25]
        whole = mx.nd.array([1], dtype="int32")
        assert compressor.compress(whole)[0] is whole
