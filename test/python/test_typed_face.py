"""What a type checker and an interactive user see of the package."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perseus
from perseus.operations import Kind, ReduceOp

SCRIPT = """
import torch

import perseus.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
    named_parameters=model.named_parameters(),
    op=hvd.Average,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loss: torch.Tensor = model(torch.ones(1, 2)).sum()
loss.backward()  # type: ignore[no-untyped-call]
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
optimizer.set_backward_passes_per_step(2)
mean: torch.Tensor = hvd.allreduce(loss, op=hvd.Sum)
number: int = hvd.Average
"""


def mypy(folder: Path, script: str) -> str:
    file = folder / "train.py"
    file.write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    # Outside of the repository, whose settings are for its own sources. mypy does not follow the
    # import hooks of editable installs.
    package = Path(perseus.__file__).parent
    assert (package / "py.typed").exists()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_a_users_script_passes_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert mypy(tmp_path, SCRIPT) == "Success: no issues found in 1 source file\n"
    wrong = SCRIPT + "optimizer.synchronise()\nhvd.allreduce(loss, op='mean')\nhvd.mean(loss)\n"
    output = mypy(tmp_path, wrong)
    assert 'has no attribute "synchronise"' in output
    assert 'Argument "op" to "allreduce" has incompatible type "str"' in output
    assert 'Module has no attribute "mean"' in output


def test_reductions_and_kinds_stay_integers() -> None:
    assert [*ReduceOp] == [0, 1, 2, 3, 4, 5]
    assert [*Kind] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert ["Average", "Sum"][ReduceOp.Sum] == "Sum"
    assert {0: "found"}[ReduceOp.Average] == "found"
    assert copy.deepcopy(ReduceOp.Max) is ReduceOp.Max


def test_dir_shows_what_there_is() -> None:
    shown = dir(perseus)
    assert set(perseus.__all__) <= set(shown)
    assert {"torch", "tensorflow", "keras", "mxnet", "elastic"} <= set(shown)
    for name in perseus.__all__:
        assert getattr(perseus, name) is not None


@pytest.mark.parametrize("ask", ["perseus.__version__", "dir(perseus)", "perseus.run"])
def test_asking_loads_no_native_code(ask: str) -> None:
    code = f"import sys, perseus; {ask}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "perseus.ddp" in loaded
    assert not loaded & {"perseus._core", "perseus.run.launch", "torch", "numpy"}
