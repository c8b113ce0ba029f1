"""Every adapter says how to install its framework where that is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# What hides a framework from a process, and what an import of an adapter then says.
PROGRAM = """
import importlib, sys
for hidden in {hidden!r}:
    sys.modules[hidden] = None
try:
    importlib.import_module({module!r})
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def said(module: str, *hidden: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module, hidden=hidden)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


@pytest.mark.parametrize(
    ("framework", "modules", "message"),
    [
        ("torch", ["perseus.torch", "perseus.torch.horovod", "perseus.torch.elastic"],
         "torch [torch] PyTorch is not installed: pip install torch"),
        ("tensorflow", ["perseus.tensorflow", "perseus.tensorflow.horovod",
                        "perseus.tensorflow.keras", "perseus.tensorflow.data.compute_service"],
         "tensorflow [tensorflow] TensorFlow is not installed: pip install tensorflow-cpu"),
        ("mxnet", ["perseus.mxnet", "perseus.mxnet.mpi_ops"],
         'mxnet [mxnet] MXNet is not installed: pip install mxnet==1.9.1 "numpy<1.24", on'),
        ("keras", ["perseus.keras", "perseus.keras.callbacks"],
         "keras [keras] Keras is not installed: pip install keras"),
    ],
)  # fmt: skip
def test_a_missing_framework_is_named_with_its_command(framework, modules, message):
    for module in modules:
        assert said(module, framework).startswith(message), module


def test_a_torch_that_is_too_old_is_named():
    program = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__version__ = "2.0.1+cu117"
try:
    import perseus.torch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[torch] PyTorch 2.0.1+cu117 is too old: Perseus needs 2.1 or newer\n"


def test_a_missing_legacy_keras_is_named_with_its_command():
    found = said("perseus.keras", "tf_keras", TF_USE_LEGACY_KERAS="1")
    assert "tf_keras is not installed: pip install tf_keras, or unset TF_USE_LEGACY_KERAS" in found


def test_a_missing_keras_is_named_where_numpy_is_missing_too():
    assert said("perseus.keras", "keras", "numpy").startswith("keras [keras] Keras is not")


def test_a_keras_without_what_it_runs_on_says_so():
    if find_spec("keras") is None:
        pytest.skip("needs Keras")
    found = said("perseus.keras", "tensorflow", KERAS_BACKEND="tensorflow")
    assert "TensorFlow is not installed: pip install tensorflow-cpu" in found
    assert "KERAS_BACKEND" in found


def test_nothing_of_a_framework_is_imported_to_find_out():
    code = "import sys, perseus.installed as i; i.require('torch'); print('torch' in sys.modules)"
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_building_for_xla_needs_tensorflow():
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from perseus.run.cli import main; sys.exit(main(['--build-xla']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "TensorFlow is not installed: pip install tensorflow-cpu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        ["-c", "from perseus import basics; basics.init()"],
        ["-m", "perseus.run", "-np", "1", "true"],
        ["-m", "perseus.run", "--check-build"],
        [
            "-c",
            "from perseus.compat.common.extensions import *; check_extension('x.torch', '', '')",
        ],
    ],
)
def test_a_source_tree_without_libraries_says_that_it_hides_the_package(program, tmp_path):
    package = Path(__file__).resolve().parents[2] / "perseus"
    # Libraries for another Python do not count.
    no_libraries = shutil.ignore_patterns("*.so", "__pycache__", "examples", "patches")
    shutil.copytree(package, tmp_path / "perseus", ignore=no_libraries)

    def said() -> str:
        command = [sys.executable, *program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    (tmp_path / "perseus" / "_core.cpython-399-x86_64-linux-gnu.so").touch()
    remedy = (
        f"{tmp_path} is the source tree, where nothing is built for this Python, and hides an "
        f"installed"
    )
    assert remedy not in said()
    assert "pip install Perseus again" in said()
    (tmp_path / "setup.py").touch()
    assert f"perseus has no native core: {remedy}" in said()
    assert "install Perseus again" not in said()
