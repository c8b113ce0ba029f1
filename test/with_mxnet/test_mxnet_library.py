"""Loading the library where something is wrong, engines of MXNet, a rank that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet")

HERE = Path(__file__).resolve().parent


def said(code: str, **environment: str) -> str:
    """What a Python program writes; its own `perseus` is this one's."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORT = """
try:
    import perseus.mxnet
    print("imported")
except ImportError as error:
    print(error)
"""


def test_mxnet_is_missing():
    found = said(f"import sys; sys.modules['mxnet'] = None\n{IMPORT}")
    assert 'MXNet is not installed: pip install mxnet==1.9.1 "numpy<1.24", on Python 3.1' in found


def test_mxnet_is_another_one():
    for version in ("2.0.0b1", "1.8.0"):
        found = said(
            "import sys, types; sys.modules['mxnet'] = types.ModuleType('mxnet')\n"
            f"sys.modules['mxnet'].__version__ = '{version}'\n{IMPORT}"
        )
        assert f"MXNet {version} is not served" in found
        assert 'pip install mxnet==1.9.1 "numpy<1.24", on Python 3.10 or 3.11' in found


FUNCTIONS = [
    "MXGetLastError", "MXEnginePushAsyncND", "MXEnginePushSyncND", "MXShallowCopyNDArray",
    "MXNDArrayFree", "MXNDArrayGetShapeEx64", "MXNDArrayGetDType", "MXNDArrayGetData",
]  # fmt: skip


@pytest.mark.parametrize("functions", [FUNCTIONS, FUNCTIONS[:-1]])
def test_mxnet_was_built_without_onednn(functions, tmp_path):
    """It lacks what restores the layouts that oneDNN changes; all other functions are required."""
    source, library = tmp_path / "mxnet.c", tmp_path / "libmxnet.so"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = said(
        "import ctypes, os, perseus\n"
        "path = os.path.join(os.path.dirname(perseus.__file__), 'libperseus_mxnet.so')\n"
        "ours = ctypes.CDLL(path)\n"
        "ours.perseus_mxnet_error.restype = ctypes.c_char_p\n"
        f"mxnet = ctypes.CDLL({str(library)!r})\n"
        "status = ours.perseus_mxnet_load(ctypes.c_void_p(mxnet._handle))\n"
        "print(status, ours.perseus_mxnet_error().decode())\n"
    )
    assert found.split() == (["0"] if functions == FUNCTIONS else ["-1", FUNCTIONS[-1]])


OPS = """
import mxnet as mx, numpy as np, perseus.mxnet as hvd
hvd.init()
array = mx.nd.array(np.arange(6).reshape(2, 3))
hvd.allreduce_(array, op=hvd.Sum, name="x", postscale_factor=2.0)
gathered = hvd.allgather(array + 1)
print((array + gathered).asnumpy().tolist())
assert hvd.allgather(array).shape == (2, 3)
try:
    hvd.broadcast(array, 5).wait_to_read()
except mx.base.MXNetError as error:
    print("invalid root" in str(error))
hvd.shutdown()
"""


@pytest.mark.parametrize(
    "engine", ["NaiveEngine", pytest.param("ThreadedEngine", marks=pytest.mark.full)]
)
def test_ops_on_engines_that_are_not_the_usual_one(engine):
    """NaiveEngine runs an op within the call that pushes it, and has no place for its error."""
    found = said(OPS, MXNET_ENGINE_TYPE=engine)
    assert found.split("\n")[:2] == ["[[1.0, 5.0, 9.0], [13.0, 17.0, 21.0]]", "True"]


def test_a_rank_dies_while_others_wait(run_ranks, tmp_path):
    found = tmp_path / "found"
    command = [sys.executable, str(HERE / "dying_rank.py"), str(found)]
    status, output = run_ranks(2, command, timeout=280)
    assert status == 0, output
    assert found.read_text().splitlines() == [
        "backward", "forward", "allreduce", "pull", "pushpull", "turn", "allgather", "init"
    ]  # fmt: skip


ENDS_AFTER_A_STEP = """
import sys
import mxnet as mx
import perseus.mxnet as hvd
from mxnet import gluon
hvd.init()
net = gluon.nn.Dense(512, in_units=512)
net.initialize()
store = "dist_sync_perseus"
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
for step in range(2):
    with mx.autograd.record():
        loss = net(mx.nd.ones((256, 512))).sum()
        if hvd.rank() == step % 2:  # the others would end the world first
            for _ in range(40):
                loss = loss + net(mx.nd.ones((256, 512))).sum()
    loss.backward()
    trainer.step(64)
"""


def test_a_script_may_end_right_after_a_step(run_ranks):
    status, output = run_ranks(2, [sys.executable, "-c", ENDS_AFTER_A_STEP])
    assert status == 0, output
    assert "Error" not in output, output
    assert "Exception" not in output, output


def test_a_script_that_ends_with_an_operation_of_its_own_is_told_by_the_others_end(run_ranks):
    script = (
        "import mxnet as mx, perseus.mxnet as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 0: hvd.allreduce(mx.nd.ones((3,)), name='of rank 0 alone')\n"
    )
    _, output = run_ranks(2, [sys.executable, "-c", script])
    assert output.count("MXNetError: Horovod has been shut down: rank 1 called") == 1, output


def test_an_uncaught_exception_is_all_that_is_said(run_ranks):
    """What is under way fails with the world, which is not what to look for."""
    script = (
        "import mxnet as mx, perseus.mxnet as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(mx.nd.ones((3,)), name=f'of.{hvd.rank()}')\n"
        "raise ValueError('the cause')\n"
    )
    status, output = run_ranks(2, [sys.executable, "-c", script])
    assert status == 1, output
    assert "<stderr>:ValueError: the cause\n" in output, output
    assert "Error" not in output.replace("ValueError: the cause", ""), output
