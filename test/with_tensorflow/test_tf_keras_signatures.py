"""The faces for Keras against Horovod's: every name, parameter and default."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras
from horovod_face import Signatures, read_facts

import perseus.keras as hvd

# Facts that both of Horovod's modules share are told once.
FACTS: dict[str, dict[str, Any]] = {}
for modules, told in read_facts("horovod_keras_api.json")["modules"].items():
    for module in modules.split(", "):
        FACTS.setdefault(module, {}).update(told)
FACES = {
    "horovod.keras": ["perseus.keras"],
    "horovod.tensorflow.keras": ["perseus.tensorflow.horovod.keras", "perseus.tensorflow.keras"],
}
MODULES = [
    pytest.param(ours + part, FACTS[theirs + part], id=ours + part)
    for theirs, faces in FACES.items()
    for ours in faces
    for part in ("", ".callbacks", ".elastic")
]

# Parameters beyond Horovod's; optional, and after its own.
EXTRA_PARAMETERS = {
    "perseus.keras": {
        "DistributedOptimizer": [
            "backward_passes_per_step",
            "average_aggregated_gradients",
            "process_set",
            "scale_local_gradients",
        ]
    },
    "perseus.keras.callbacks": {"BestModelCheckpoint": ["save_weights_only"]},
    **{
        f"{face}.elastic": {
            f"{state}.commit": ["copy"] for state in ("KerasState", "TensorFlowKerasState")
        }
        for face in (
            "perseus.keras",
            "perseus.tensorflow.keras",
            "perseus.tensorflow.horovod.keras",
        )
    },
}
COMPRESSING = {"DistributedOptimizer", "PartialDistributedOptimizer", "load_model"}
# Horovod's True makes every op an error.
OTHER_DEFAULTS = {"perseus.keras": {("allreduce", "average"): None}}
# Graphs of TensorFlow 1 had these.
MISSING_ATTRIBUTES = {"MetricAverageCallback": {"variables", "allreduce_ops"}}


def _signatures(face: str) -> Signatures:
    """Defaults are names of perseus.keras, whichever face has the function."""
    extra, other_defaults = EXTRA_PARAMETERS.get(face, {}), OTHER_DEFAULTS.get(face)
    return Signatures(hvd, extra, COMPRESSING, other_defaults)


@pytest.mark.parametrize(("face", "names"), MODULES)
def test_nothing_is_missing(face, names):
    module = importlib.import_module(face)
    for name, fact in names.items():
        assert hasattr(module, name), name
        found = getattr(module, name)
        if fact["kind"] == "constant":
            assert found == int(fact["value"])
        elif fact["kind"] == "module":
            assert isinstance(found, types.ModuleType)
        elif fact["kind"] == "function":
            _signatures(face).expect_parameters(name, found, fact["params"])
            assert (inspect.getdoc(found) or "").strip()
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(("face", "names"), MODULES)
def test_classes_have_horovods_methods(face, names):
    module = importlib.import_module(face)
    for name, fact in names.items():
        if fact["kind"] != "class" or name == "Compression":
            continue
        for method, parameters in fact["methods"].items():
            function = getattr(getattr(module, name), method)
            fact_of = name if method == "__init__" else f"{name}.{method}"
            _signatures(face).expect_parameters(fact_of, function, parameters)


@pytest.mark.parametrize(("face", "names"), [m for m in MODULES if "callbacks" in m.id])
def test_callbacks_have_horovods_attributes(face, names):
    module = importlib.import_module(face)
    arguments = {
        "BroadcastGlobalVariablesCallback": (0,),
        "LearningRateScheduleCallback": (0.1, 0.5),
        "LearningRateWarmupCallback": (0.1,),
    }
    for name, fact in names.items():
        if fact["kind"] == "class":
            made = getattr(module, name)(*arguments.get(name, ()))
            for attribute in set(fact["attributes"] or ()) - MISSING_ATTRIBUTES.get(name, set()):
                assert hasattr(made, attribute), (name, attribute)


def test_the_distributed_optimizers_methods():
    face = importlib.import_module("perseus.tensorflow.horovod")
    face.init()
    made = face.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=False)
    for name in ("register_local_var", "apply_gradients", "variables", "process_set"):
        assert hasattr(made, name)
    assert made.scale_local_gradients is False
    assert face.keras is importlib.import_module("perseus.tensorflow.horovod.keras")
    assert face.elastic.run is face.keras.elastic.run
    face.shutdown()
