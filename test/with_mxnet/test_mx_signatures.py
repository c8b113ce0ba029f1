"""perseus.mxnet against horovod.mxnet: every name, parameter and default."""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mxnet")

import mxnet as mx
import numpy as np

import perseus.mxnet as hvd

FACTS = json.loads(
    (Path(__file__).parent.parent / "data" / "horovod_mxnet_api.json").read_text("utf-8")
)
NAMES = FACTS["names"]
KINDS = {
    "positional_only": inspect.Parameter.POSITIONAL_ONLY,
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}
FUNCTIONS = sorted(name for name, facts in NAMES.items() if facts["kind"] == "function")
CLASSES = ["DistributedOptimizer", "DistributedTrainer", "ProcessSet"]
# Its parameters are written out: perseus.basics has one for all frameworks.
WRITTEN_OUT = {"init": ["comm", "process_sets"]}


def _value(text: str) -> Any:
    """A default from its source text, in the face's own namespace."""
    return eval(text, {**vars(hvd)})


def _assert_parameters(name: str, function: Any, expected: list[dict[str, str]]) -> None:
    actual = list(inspect.signature(function).parameters.values())
    actual = [parameter for parameter in actual if parameter.name != "self"]
    if name in WRITTEN_OUT:
        assert [parameter.name for parameter in actual] == WRITTEN_OUT[name]
        return
    assert [parameter.name for parameter in actual] == [fact["name"] for fact in expected]
    for fact, parameter in zip(expected, actual, strict=True):
        assert parameter.kind == KINDS[fact["kind"]]
        if parameter.name == "compression":
            # What is taken for granted, so that Compression.none means exact.
            assert parameter.default is hvd.Compression.settings
            assert issubclass(hvd.Compression.settings, _value(fact["default"]))
        elif "default" in fact:
            assert parameter.default == _value(fact["default"]), parameter.name
        else:
            assert parameter.default is inspect.Parameter.empty, parameter.name


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


@pytest.mark.parametrize("class_name", CLASSES)
def test_class_has_horovods_methods(class_name):
    for name, facts in NAMES[class_name]["methods"].items():
        _assert_parameters(name, getattr(getattr(hvd, class_name), name), facts["params"])


def test_classes_are_mxnets():
    assert issubclass(hvd.DistributedOptimizer, mx.optimizer.Optimizer)
    assert issubclass(hvd.DistributedTrainer, mx.gluon.Trainer)


@pytest.mark.parametrize("module", sorted(FACTS["modules"]))
def test_modules_have_horovods_operations(module):
    for name, facts in FACTS["modules"][module].items():
        found = getattr(getattr(hvd, module), name, None)
        if name in NAMES:
            assert found is getattr(hvd, name), name
        elif facts["kind"] == "function":
            _assert_parameters(name, found, facts["params"])


def test_compressors():
    for class_name, methods in FACTS["compression"].items():
        compressor = getattr(hvd.compression, class_name)
        for name, parameters in methods.items():
            assert isinstance(inspect.getattr_static(compressor, name), staticmethod)
            _assert_parameters(name, getattr(compressor, name), parameters)
    assert hvd.Compression.none is hvd.compression.NoneCompressor
    assert hvd.Compression.fp16 is hvd.compression.FP16Compressor
    assert hvd.Compression.topk(0.25) is hvd.Compression.topk(0.25)


def test_compressors_by_themselves():
    values = mx.nd.array([1.5, -2.25])
    for name, dtype in (("fp16", np.float16), ("bf16", [("bfloat16", "<u2")])):
        compressor = getattr(hvd.Compression, name)
        sent, context = compressor.compress(values)
        assert np.dtype(sent.dtype) == np.dtype(dtype)
        assert compressor.decompress(sent, context).asnumpy().tolist() == [1.5, -2.25]
        whole = mx.nd.array([1], dtype="int32")
        assert compressor.compress(whole)[0] is whole
