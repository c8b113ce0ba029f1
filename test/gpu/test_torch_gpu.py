"""PyTorch's tensors on a GPU, two ranks on one: `make test-gpu` runs it where there is a GPU.

The same ranks run on the CPU everywhere, so that they do not wait for a GPU to be found wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent


# How two ranks on one GPU reach each other: NCCL joins them since 2.30, if it is asked to.
BY_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
BY_HOST = {"PERSEUS_GPU_OPERATIONS": "perseus"}
BETWEEN_HOSTS = {"PERSEUS_TRANSPORT": "tcp"}
WAYS = [
    ("cpu", {}),
    ("cpu", BETWEEN_HOSTS),
    ("cuda:0", BY_NCCL),
    ("cuda:0", BY_HOST),
    ("cuda:0", BETWEEN_HOSTS),
]


@pytest.mark.parametrize("program", ["torch_ranks.py", "training_ranks.py", "ddp_ranks.py"])
@pytest.mark.parametrize(("device", "variables"), WAYS)
def test_torch_on_two_ranks(device: str, variables: dict[str, str], program: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU on this machine")
    if variables is BY_NCCL and torch.cuda.nccl.version() < (2, 30):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} does not join two ranks on one GPU")
    result = subprocess.run(
        [sys.executable, "-m", "perseus.run", "-np", "2", sys.executable, HERE / program, device],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 has checked everything on {device}" in result.stdout
    assert variables is not BY_NCCL or "[nccl]" not in result.stderr, "NCCL was not used"
