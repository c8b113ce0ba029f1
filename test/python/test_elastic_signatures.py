"""perseus.torch.elastic and perseus.elastic against Horovod's: names, parameters, defaults."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

torch = pytest.importorskip("torch")

from horovod_face import Signatures, read_facts

import perseus.torch.horovod as hvd
from perseus import basics, elastic
from perseus.elastic import state

FACTS = read_facts("horovod_torch_elastic_api.json")
MODULES = {
    "horovod.common.elastic": "perseus.elastic",
    "horovod.torch.elastic": "perseus.torch.elastic",
    "horovod.torch.elastic.sampler": "perseus.torch.elastic.sampler",
    "horovod.torch.elastic.state": "perseus.torch.elastic.state",
}
CASES = [
    pytest.param(module, name, id=f"{module.removeprefix('horovod.')}.{name}")
    for module in MODULES
    for name in FACTS[module]
]
# Its argument may be left out here.
MORE_LENIENT = {("HostsUpdatedInterrupt", "__init__")}
# Horovod's have no defaults; those of a State serve scripts without a framework.
DEFAULTS = {
    ("__init__", "bcast_object"): state._from_rank_0,
    ("__init__", "get_rank"): basics.rank,
    ("run_fn", "reset"): elastic.reset,
}
SIGNATURES = Signatures(hvd, {"commit": ["copy"]}, (), DEFAULTS)


def test_elastic_is_part_of_the_public_face():
    assert hvd.elastic is importlib.import_module("perseus.torch.elastic")
    for name in hvd.elastic.__all__:
        assert hasattr(hvd.elastic, name)
    for name in elastic.__all__:
        assert hasattr(elastic, name)
    assert hvd.elastic.HorovodInternalError is hvd.HorovodInternalError
    assert hvd.elastic.HostsUpdatedInterrupt is hvd.HostsUpdatedInterrupt


@pytest.mark.parametrize(("module", "name"), CASES)
def test_name_is_there_with_horovods_parameters(module, name):
    facts = FACTS[module][name]
    found = getattr(importlib.import_module(MODULES[module]), name)
    if facts["kind"] == "function":
        SIGNATURES.expect_parameters(name, found, facts["params"])
    elif facts["kind"] == "module":
        assert isinstance(found, types.ModuleType)
    elif facts["kind"] == "constant":
        assert type(found).__name__ == facts["value"].removesuffix("()")
    else:
        bases = [base.__name__ for base in found.__mro__]
        assert {base.split(".")[-1] for base in facts["bases"]} <= set(bases)
        for method, parameters in facts["methods"].items():
            if (name, method) not in MORE_LENIENT:
                SIGNATURES.expect_parameters(method, getattr(found, method), parameters)


@pytest.mark.parametrize(("module", "name"), CASES)
def test_name_says_what_it_is_for(module, name):
    found = getattr(importlib.import_module(MODULES[module]), name)
    assert (inspect.getdoc(found) or "").strip()


def test_attributes_of_instances():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    sampler = hvd.elastic.ElasticSampler(range(5))
    instances = {
        "ElasticSampler": sampler,
        "ModelStateHandler": hvd.elastic.state.ModelStateHandler(model),
        "OptimizerStateHandler": hvd.elastic.state.OptimizerStateHandler(
            torch.optim.SGD(model.parameters(), lr=0.1)
        ),
        "SamplerStateHandler": hvd.elastic.state.SamplerStateHandler(sampler),
        "StateHandler": hvd.elastic.state.StateHandler(3),
        "HostsUpdatedInterrupt": hvd.HostsUpdatedInterrupt(True),
    }
    listed = {
        name: facts["instance_attributes"]
        for module in MODULES
        for name, facts in FACTS[module].items()
        if facts.get("instance_attributes")
    }
    assert set(listed) == set(instances)
    for name, attributes in listed.items():
        for attribute in attributes:
            assert hasattr(instances[name], attribute), f"{name}.{attribute}"
    hvd.shutdown()


def test_results_of_host_updates_are_horovods_numbers():
    found = {result.name: int(result) for result in elastic.HostUpdateResult.__members__.values()}
    facts = FACTS["horovod.common.elastic"]["HostUpdateResult"]["class_attributes"]
    assert found == {name: eval(text, dict(found)) for name, text in facts.items()}
