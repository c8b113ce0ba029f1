"""perseus.torch.horovod against horovod.torch: every public name, parameter and default."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from horovod_face import Face

import perseus.torch
import perseus.torch.horovod as hvd

FACE = Face(
    hvd,
    "horovod_torch_api.json",
    extra={
        "allgather_object": ["process_set"],
        "commit": ["copy"],
        "zero_grad": ["set_to_none"],
    },
    compressing={"DistributedOptimizer"},
)


def test_names():
    FACE.expect_names()
    FACE.expect_same_names(perseus.torch)


@pytest.mark.parametrize("name", FACE.functions)
def test_function_is_horovods(name):
    FACE.expect_function(name)


def test_constants_and_modules():
    FACE.expect_constants_and_modules()


def test_classes():
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for class_name in ("ProcessSet", "SyncBatchNorm"):
        FACE.expect_methods(class_name)
    for name, text in FACE.names["ProcessSet"]["class_attributes"].items():
        assert getattr(hvd.ProcessSet, name) == eval(text)
    assert (
        str(hvd.ProcessSet([1, 0]))
        == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    )


def test_compressors():
    FACE.expect_compressors()
    assert issubclass(hvd.Compression.fp16, hvd.compression.Compressor)


@pytest.fixture
def optimizer():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    yield hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.shutdown()


def test_distributed_optimizers_methods_and_attributes(optimizer):
    facts = FACE.names["DistributedOptimizer"]
    for name, parameters in facts["instance_methods"].items():
        if name != "__init__":  # made by the factory
            FACE.expect_parameters(name, getattr(optimizer, name), parameters)
    for name in facts["instance_attributes"]:
        assert hasattr(optimizer, name)
