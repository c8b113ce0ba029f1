"""PyTorch's tensors on a GPU, two ranks on one: `make test-gpu` runs it where there is a GPU.

The same ranks run on the CPU everywhere, so that they do not wait for a GPU to be found wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perseus import _core

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent


# How two ranks on one GPU reach each other: NCCL joins them since 2.30, if it is asked to.
SHARES_GPUS = 23000
BY_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
BY_HOST = {"PERSEUS_GPU_OPERATIONS": "perseus"}
BETWEEN_HOSTS = {"PERSEUS_TRANSPORT": "tcp"}
BY_KERNELS = {"PERSEUS_TRANSPORT": "tcp", "PERSEUS_GPU_CODECS": "1"}
WAYS = [
    ("cpu", {}),
    pytest.param("cpu", BETWEEN_HOSTS, marks=pytest.mark.full),
    ("cuda:0", BY_NCCL),
    ("cuda:0", BY_HOST),
    ("cuda:0", BETWEEN_HOSTS),
    ("cuda:0", BY_KERNELS),
]


def nccl() -> int:
    """The version that Perseus opens, as the number 23200 for 2.32."""
    return _core.find_nccl()[0]


@pytest.mark.parametrize("program", ["torch_ranks.py", "training_ranks.py", "ddp_ranks.py"])
@pytest.mark.parametrize(("device", "variables"), WAYS)
def test_torch_on_two_ranks(device: str, variables: dict[str, str], program: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU on this machine")
    if device != "cpu" and variables is BY_NCCL and nccl() < SHARES_GPUS:
        pytest.skip(f"NCCL {nccl()}, which two ranks on one GPU need {SHARES_GPUS} of, or newer")
    result = subprocess.run(
        [sys.executable, "-m", "perseus.run", "-np", "2", sys.executable, HERE / program, device],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 has checked everything on {device}" in result.stdout
    assert variables is not BY_NCCL or "[nccl]" not in result.stderr, "NCCL was not used"


@pytest.mark.parametrize(("case", "codecs"), [("network", []), ("gradients", ["--codec", "int8"])])
def test_bench_measures_tensors_on_gpus(case: str, codecs: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perseus.bench", case, "--gpu", *codecs, "--sizes", "1M"]
    command += ["--seconds", "0.2", "--json", str(tmp_path / "r.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if not torch.cuda.is_available():
        assert result.returncode == 2
        assert result.stderr == "perseus-bench: error: --gpu: PyTorch sees no GPU on this machine\n"
        return
    assert result.returncode == 0, result.stdout + result.stderr
    found = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert found and all(entry["verified"] for entry in found)
