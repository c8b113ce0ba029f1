"""perseus.torch.horovod against horovod.torch: every public name, parameter and default."""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import perseus.torch.horovod as hvd

FACTS = json.loads(
    (Path(__file__).parent.parent / "data" / "horovod_torch_api.json").read_text(encoding="utf-8")
)
NAMES = FACTS["names"]

# Parameters beyond Horovod's; optional, and after its own.
EXTRA_PARAMETERS = {"allgather_object": ["process_set"], "zero_grad": ["set_to_none"]}
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
    for fact, parameter in zip(expected, actual, strict=False):
        assert parameter.name == fact["name"]
        assert parameter.kind == KINDS[fact["kind"]]
        if (name, parameter.name) == ("DistributedOptimizer", "compression"):
            # The one default that differs: so that Compression.none, when given, means exact.
            assert parameter.default is hvd.Compression.settings
            assert issubclass(hvd.Compression.settings, _value(fact["default"]))
        elif "default" in fact:
            assert parameter.default == _value(fact["default"]), parameter.name
        else:
            assert parameter.default is inspect.Parameter.empty, parameter.name
    extra = actual[len(expected) :]
    assert len(actual) >= len(expected), f"misses {expected[len(actual) :]}"
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


def test_classes():
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for class_name in ("ProcessSet", "SyncBatchNorm"):
        for name, facts in NAMES[class_name]["methods"].items():
            _assert_parameters(name, getattr(getattr(hvd, class_name), name), facts["params"])
    for name, text in (("process_set_id", "None"), ("ranks", "None"), ("mpi_comm", "None")):
        assert getattr(hvd.ProcessSet, name) == eval(text)
    assert (
        str(hvd.ProcessSet([1, 0]))
        == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    )


def test_compressors():
    for class_name, methods in FACTS["compression"].items():
        compressor = getattr(hvd.compression, class_name)
        for name, parameters in methods.items():
            assert isinstance(inspect.getattr_static(compressor, name), staticmethod)
            _assert_parameters(name, getattr(compressor, name), parameters)
    assert hvd.Compression.none is hvd.compression.NoneCompressor
    assert hvd.Compression.fp16 is hvd.compression.FP16Compressor
    assert issubclass(hvd.Compression.fp16, hvd.compression.Compressor)


@pytest.fixture
def optimizer():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    yield hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.shutdown()


def test_distributed_optimizers_methods_and_attributes(optimizer):
    facts = NAMES["DistributedOptimizer"]
    for name, method in facts["instance_methods"].items():
        if name == "__init__":
            continue  # made by the factory
        _assert_parameters(name, getattr(optimizer, name), method["params"])
    for name in facts["instance_attributes"]:
        assert hasattr(optimizer, name)
