"""What is found under Horovod's module names: Perseus' own modules, with the names scripts use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from perseus import basics
from perseus.compat.common import extensions
from perseus.compat.common.basics import HorovodBasics
from perseus.compat.names import MODULES
from perseus.errors import HorovodVersionMismatchError


def run(code: str) -> str:
    """The output of a program that has the alias."""
    code = "import perseus.compat.horovod\n" + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_module_is_perseus_own_or_says_that_it_is_missing() -> None:
    pytest.importorskip("torch")
    output = run("""
        import importlib, json, sys
        from perseus.compat.names import MODULES
        found = {}
        for name in MODULES:
            try:
                found[name] = importlib.import_module(name).__name__
                assert sys.modules[name] is importlib.import_module(name)
            except ModuleNotFoundError as error:
                found[name] = str(error)
                frameworks = ("tensorflow", "keras", "mxnet")
                assert error.name in (name, name.rpartition(".")[0], *frameworks)
            except ImportError as error:
                found[name] = str(error)
        print(json.dumps(found))
    """)
    found = json.loads(output)
    assert found["horovod.torch"] == "perseus.torch.horovod"
    for name, real in MODULES.items():
        if real is None:
            assert found[name] == name
        elif "TensorFlow is not installed" in found[name] or "Keras is not inst" in found[name]:
            assert name.startswith(("horovod.tensorflow", "horovod.keras"))
        elif "MXNet is not installed" in found[name]:
            assert name.startswith("horovod.mxnet")
        elif found[name] != real:
            assert found[name].endswith("which Perseus does not have yet")
            assert not _exists(real)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_import_statements_of_scripts_work() -> None:
    pytest.importorskip("torch")
    run("""
        import horovod
        import horovod.torch as hvd
        import horovod.torch.mpi_ops
        from horovod.torch import mpi_ops
        from horovod.torch.mpi_ops import HorovodAllreduce, _basics, allreduce_async_
        from horovod.torch.compression import Compression, Compressor
        from horovod.torch.functions import broadcast_object
        from horovod.torch.optimizer import DistributedOptimizer
        from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
        from horovod.common.process_sets import ProcessSet, global_process_set
        from horovod.common.basics import HorovodBasics
        from horovod.common.util import env, extension_available, gloo_built, mpi_built
        import perseus.torch.horovod as own
        assert horovod.torch is hvd is own and hvd.mpi_ops is horovod.torch.mpi_ops is mpi_ops
        assert hvd.HorovodInternalError is HorovodInternalError
        assert hvd.DistributedOptimizer is DistributedOptimizer
        assert hvd.ProcessSet is ProcessSet and hvd.global_process_set is global_process_set
        assert tuple(map(int, horovod.__version__.split("."))) >= (0, 21, 0)
        assert extension_available("torch") and gloo_built() and not mpi_built()
        hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
        hvd.init()
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
        assert hvd.mpi_ops._basics.rank() == 0 and hvd.mpi_ops.is_homogeneous()
        import torch
        model = torch.nn.Linear(2, 1)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)
        assert {n: p for p, n in optimizer._parameter_names.items()} == {
            "weight": model.weight, "bias": model.bias
        }
    """)


def test_every_module_of_keras_is_in_the_table() -> None:
    path = Path(__file__).parent.parent / "data" / "horovod_keras_api.json"
    for modules in json.loads(path.read_text("utf-8"))["modules"]:
        assert MODULES.keys() >= set(modules.split(", "))


def test_replacing_a_name_under_the_alias_replaces_it() -> None:
    pytest.importorskip("torch")
    run("""
        from unittest import mock
        import horovod.torch as hvd
        with mock.patch("horovod.torch.mpi_ops.rocm_built", return_value="patched"):
            from perseus.torch import mpi_ops
            assert mpi_ops.rocm_built() == "patched"
        assert mpi_ops.rocm_built() is False
    """)


def test_modules_without_a_counterpart_say_so() -> None:
    output = run("""
        for name in ("horovod.spark", "horovod.runner.launch", "horovod.ray"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                print(error)
    """).splitlines()
    assert len(output) == 3
    assert all("Perseus has no counterpart" in line for line in output)


def test_extension_that_perseus_cannot_serve() -> None:
    assert not extensions.extension_available("caffe2")
    assert not extensions.extension_available("errors")  # a module, but no adapter
    with pytest.raises(ImportError, match=r"Extension horovod\.caffe2 has not been built"):
        extensions.check_extension("horovod.caffe2", "HOROVOD_WITH_CAFFE2", __file__, "lib")


def test_env_restores_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPAT_A", "before")
    monkeypatch.delenv("COMPAT_B", raising=False)
    with extensions.env(COMPAT_A="in", COMPAT_B="in", COMPAT_C=None):
        assert (os.environ["COMPAT_A"], os.environ["COMPAT_B"]) == ("in", "in")
        assert "COMPAT_C" not in os.environ
        del os.environ["COMPAT_B"]
    assert os.environ["COMPAT_A"] == "before" and "COMPAT_B" not in os.environ


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("1.10.0", "1.9.1", True),
        ("1.9", "1.9.1", False),
        ("2.0.0rc1", "2.0.0", False),
        ("2.0.0.dev2024", "2.0.0", False),
        ("2.0", "2.0.0", True),
    ],
)
def test_versions_compare_by_number(version: str, target: str, expected: bool) -> None:
    assert extensions.is_version_greater_equal_than(version, target) is expected


def test_versions_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="only accepts string"):
        extensions.is_version_greater_equal_than(1, "1.0.0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"major\.minor\.patch"):
        extensions.is_version_greater_equal_than("1.0", "1.0")


def test_small_tools() -> None:
    assert extensions.split_list(list("abcdefg"), 3) == [list("abc"), list("de"), list("fg")]
    assert [n for n in range(9) if extensions.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert extensions.is_iterable([]) and not extensions.is_iterable(1)
    path = extensions.get_extension_full_path("/a/b.py", "c", "lib")
    assert path == f"/a/c/lib{extensions.get_ext_suffix()}"
    assert issubclass(HorovodVersionMismatchError, ImportError)


def test_average_is_understood_and_warned_of() -> None:
    resolve = extensions.get_average_backwards_compatibility_fun(HorovodBasics)
    assert resolve(None, None) == 0 and resolve(4, None) == 4
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert resolve(None, False) == 1
    with pytest.raises(ValueError, match="supersedes average"):
        resolve(1, True)


def _horovods_functions() -> list[str]:
    path = Path(__file__).parent.parent / "data" / "horovod_torch_api.json"
    names = json.loads(path.read_text("utf-8"))["names"]
    return [name for name, facts in names.items() if facts["kind"] in ("function", "constant")]


def test_basics_as_an_object_are_the_functions() -> None:
    shared = [name for name in _horovods_functions() if hasattr(basics, name)]
    assert len(shared) > 15
    for name in shared:
        assert getattr(HorovodBasics(), name) is getattr(basics, name)
    with pytest.raises(AttributeError, match="_world"):
        HorovodBasics()._world  # noqa: B018


def test_mpi_ops_has_every_operation_of_the_face() -> None:
    pytest.importorskip("torch")
    from perseus.torch import functions, horovod, mpi_ops, optimizer

    elsewhere = {"check_extension", *vars(functions), *vars(optimizer)} - set(mpi_ops.__all__)
    for name in _horovods_functions():
        if hasattr(horovod, name) and name not in elsewhere:
            assert getattr(mpi_ops, name) is getattr(horovod, name)
            assert name in mpi_ops.__all__
    assert all(hasattr(mpi_ops, name) for name in mpi_ops.__all__)
    assert mpi_ops.handle_average_backwards_compatibility(None, None) == mpi_ops.Average
