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


@pytest.mark.parametrize("program", ["torch_ranks.py", "training_ranks.py", "ddp_ranks.py"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_torch_on_two_ranks(device: str, transport: str, program: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU on this machine")
    result = subprocess.run(
        [sys.executable, "-m", "perseus.run", "-np", "2", sys.executable, HERE / program, device],
        env={**os.environ, "PERSEUS_TRANSPORT": transport}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 has checked everything on {device}" in result.stdout
