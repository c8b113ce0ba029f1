"""perseus.tensorflow.horovod against horovod.tensorflow: every name, parameter and default."""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import perseus.tensorflow.horovod as hvd
from perseus.tensorflow import gradient_aggregation, gradient_aggregation_eager

FACTS = json.loads(
    (Path(__file__).parent.parent / "data" / "horovod_tensorflow_api.json").read_text("utf-8")
)
NAMES = FACTS["names"]
MODULES = {
    "gradient_aggregation": gradient_aggregation,
    "gradient_aggregation_eager": gradient_aggregation_eager,
}

# Parameters beyond Horovod's; optional, and after its own.
EXTRA_PARAMETERS = {"gradient": ["unconnected_gradients"]}
# What DistributedOptimizer and the tapes take for granted, so that Compression.none means exact.
GRADIENTS = {"DistributedOptimizer", "DistributedGradientTape", "PartialDistributedGradientTape"}
KINDS = {
    "positional_only": inspect.Parameter.POSITIONAL_ONLY,
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}
FUNCTIONS = sorted(name for name, facts in NAMES.items() if facts["kind"] == "function")


def _value(text: str) -> Any:
    """A default from its source text, in the face's own namespace."""
    return eval(text, {**vars(hvd)})


def _assert_parameters(name: str, function: Any, expected: list[dict[str, str]]) -> None:
    actual = list(inspect.signature(function).parameters.values())
    actual = [parameter for parameter in actual if parameter.name != "self"]
    assert len(actual) >= len(expected), f"misses {expected[len(actual) :]}"
    for fact, parameter in zip(expected, actual, strict=False):
        assert parameter.name == fact["name"]
        assert parameter.kind == KINDS[fact["kind"]]
        if name in GRADIENTS and parameter.name == "compression":
            assert parameter.default is hvd.Compression.settings
            assert issubclass(hvd.Compression.settings, _value(fact["default"]))
        elif "default" in fact:
            assert parameter.default == _value(fact["default"]), parameter.name
        else:
            assert parameter.default is inspect.Parameter.empty, parameter.name
    extra = actual[len(expected) :]
    assert [parameter.name for parameter in extra] == EXTRA_PARAMETERS.get(name, [])
    assert all(parameter.default is not inspect.Parameter.empty for parameter in extra)


def test_no_name_is_missing():
    assert [name for name in NAMES if not hasattr(hvd, name)] == []


def test_everything_exported_exists_and_everything_public_is_exported():
    for name in hvd.__all__:
        assert hasattr(hvd, name)
    assert set(hvd.__all__) >= set(NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_horovods_parameters(name):
    _assert_parameters(name, getattr(hvd, name), NAMES[name]["params"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_says_what_it_does(name):
    assert (inspect.getdoc(getattr(hvd, name)) or "").strip()


def test_constants_and_modules():
    for name, facts in NAMES.items():
        if facts["kind"] == "constant":
            assert getattr(hvd, name) == int(facts["value"])
            assert type(getattr(hvd, name)) is int
        elif facts["kind"] == "module":
            assert isinstance(getattr(hvd, name), types.ModuleType)
    assert hvd.global_process_set.process_set_id == 0


@pytest.mark.parametrize(
    "class_name",
    ["BroadcastGlobalVariablesHook", "LocalGradientAggregationHelper", "ProcessSet"],
)
def test_class_has_horovods_methods(class_name):
    for name, facts in NAMES[class_name]["methods"].items():
        _assert_parameters(name, getattr(getattr(hvd, class_name), name), facts["params"])


def test_sync_batch_normalization():
    parameters = inspect.signature(hvd.SyncBatchNormalization).parameters
    assert list(parameters) == ["fused", "kwargs"]
    assert parameters["fused"].default is False
    assert issubclass(hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_helpers_of_gradient_aggregation(module):
    for name, facts in FACTS["modules"][module].items():
        made = getattr(MODULES[module], name)
        if facts["kind"] == "function":
            _assert_parameters(name, made, facts["params"])
        for method, described in facts.get("methods", {}).items():
            _assert_parameters(method, getattr(made, method), described["params"])


def test_helpers_attributes():
    helper = hvd.LocalGradientAggregationHelper(2, None, False, True, 0, "optimizer_type_keras")
    for name in NAMES["LocalGradientAggregationHelper"]["instance_attributes"]:
        assert hasattr(helper, name), name
    eager = gradient_aggregation_eager.LocalGradientAggregationHelperEager(2, None, False, True)
    facts = FACTS["modules"]["gradient_aggregation_eager"]["LocalGradientAggregationHelperEager"]
    for name in facts["instance_attributes"]:
        assert hasattr(eager, name), name


def test_compressors():
    for class_name, methods in FACTS["compression"].items():
        compressor = getattr(hvd.compression, class_name)
        for name, parameters in methods.items():
            assert isinstance(inspect.getattr_static(compressor, name), staticmethod)
            _assert_parameters(name, getattr(compressor, name), parameters)
    assert hvd.Compression.none is hvd.compression.NoneCompressor
    assert hvd.Compression.fp16 is hvd.compression.FP16Compressor
    assert hvd.Compression.topk(0.25) is hvd.Compression.topk(0.25)


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
        facts = NAMES[name]
        for method, described in facts["instance_methods"].items():
            if method != "__init__":  # made by the factory
                _assert_parameters(method, getattr(made, method), described["params"])
        for attribute in facts["instance_attributes"]:
            assert hasattr(made, attribute), attribute
