"""Loading the ops where something is wrong, and a rank that dies under a graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from freed_memory import GIVEN_BACK, KEPT, page_faults

pytest.importorskip("tensorflow")

HERE = Path(__file__).resolve().parent


def said(code: str) -> str:
    """What a Python program writes; its own `perseus` is this one's."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORT = """
try:
    import perseus.tensorflow.library
    print("imported")
except ImportError as error:
    print(error)
"""


def test_tensorflow_is_missing():
    found = said(f"import sys; sys.modules['tensorflow'] = None\n{IMPORT}")
    assert "TensorFlow is not installed: pip install tensorflow-cpu (2.15 or newer)" in found


INIT = "import perseus.tensorflow.library\nfrom perseus import basics\nbasics.init()"


@pytest.mark.parametrize(("value", "faults"), [("1", KEPT), ("0", GIVEN_BACK)])
def test_freed_memory_is_kept_if_the_variable_says_so(value, faults):
    assert page_faults(INIT, PERSEUS_KEEP_FREED_MEMORY=value) in faults


def test_tensorflow_is_too_old():
    found = said(
        "import sys, types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
        f"sys.modules['tensorflow'].__version__ = '2.14.1'\n{IMPORT}"
    )
    assert "TensorFlow 2.14.1 is too old: Perseus needs 2.15 or newer" in found


def test_completions_are_handed_over_in_another_way():
    """The self-test notices before it could crash, and lets the step end."""
    found = said("""
import ctypes, tensorflow as tf
from perseus.tensorflow import library, mpi_ops as hvd
owned = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 22)
library._library.perseus_tensorflow_set_convention(int(not owned))
hvd.init()
for run in (hvd._allreduce, tf.function(hvd._allreduce)):
    try:
        print(run(tf.ones([3])))
    except tf.errors.InternalError as error:
        print("self-test failed" in str(error))
""")
    assert found.split() == ["True", "True"]


WAYS = ["function", "session", "eager", "fit"]
FULL = [pytest.param(way, marks=pytest.mark.full) for way in WAYS[:3]]


@pytest.mark.parametrize("first", [*FULL, "fit"])
def test_a_rank_dies_while_others_train(run_ranks, tmp_path, first):
    """The first way meets the death, the others come after it."""
    found, ways = tmp_path / "found", [first, *[way for way in WAYS if way != first]]
    command = [sys.executable, str(HERE / "dying_rank.py"), str(found), *ways]
    status, output = run_ranks(2, command)
    assert status == 0, output
    assert found.read_text().splitlines() == [f"{way} UnknownError" for way in ways]
