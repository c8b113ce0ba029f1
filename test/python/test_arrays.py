"""perseus.arrays on ranks of their own, with NumPy's arrays and those of a stand-in GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from standins.gpu import compile_driver

RANKS = Path(__file__).with_name("array_ranks.py")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"))


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_arrays_of_cpus_and_gpus(ranks: int, driver: Path) -> None:
    result = run(
        [
            sys.executable,
            "-m",
            "perseus.run",
            "-np",
            str(ranks),
            sys.executable,
            str(RANKS),
            str(driver),
        ]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} has checked everything" in result.stdout


SUBMIT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
import perseus.arrays as hvd
hvd.init()
class OnGpu:
    data = {"data": (4096, False), "version": 3}
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", **data}
if len(sys.argv) > 2:
    import ctypes
    ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
try:
    hvd.allreduce(OnGpu())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_no_driver_is_one_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "libcuda.so.1"
    broken.write_text("not a library")
    result = run(
        [sys.executable, "-c", SUBMIT, str(RANKS.parents[1])], LD_LIBRARY_PATH=str(tmp_path)
    )
    assert "[cuda] GPUs need NVIDIA's driver, which cannot be opened" in result.stdout
    assert "install it, or put its directory into LD_LIBRARY_PATH" in result.stdout, result.stderr


def test_check_build_tells_of_the_driver(driver: Path) -> None:
    command = [sys.executable, "-m", "perseus.run", "--check-build"]
    result = run(command, LD_LIBRARY_PATH=str(driver.parent))
    assert "    [X] CUDA\n" in result.stdout
    assert "NVIDIA's driver serves CUDA 12.4; GPUs of this host: 2\n" in result.stdout


def test_old_driver_is_one_clear_error(driver: Path) -> None:
    result = run(
        [sys.executable, "-c", SUBMIT, str(RANKS.parents[1]), str(driver)],
        STANDIN_CUDA_VERSION="11020",
    )
    assert "[cuda] NVIDIA's driver serves CUDA 11.2: install one for CUDA 11.4" in result.stdout
