"""perseus.arrays on ranks of their own, with NumPy's arrays and those of a stand-in GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from standins.gpu import compile_driver, compile_nccl

RANKS = Path(__file__).with_name("array_ranks.py")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"))


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    # A GPU's own libraries may be named for whatever else runs here; these tests bring theirs.
    inherited = {k: v for k, v in os.environ.items() if k != "PERSEUS_NCCL_LIBRARY"}
    return subprocess.run(
        command, env={**inherited, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_nccl(compile_driver(tmp_path_factory.mktemp("nccl")))


def run_ranks(ranks: int, driver: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "perseus.run", "-np", str(ranks)]
    return run([*launcher, sys.executable, str(RANKS), str(driver)], **variables)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_arrays_of_cpus_and_gpus(ranks: int, driver: Path) -> None:
    result = run_ranks(ranks, driver)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} has checked everything" in result.stdout


@pytest.mark.parametrize("hosts", [{}, {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "2"}])
def test_nccl_joins_the_processes_of_a_host(hosts: dict[str, str], nccl: Path) -> None:
    driver = nccl.with_name("libcuda.so.1")
    result = run_ranks(4, driver, PERSEUS_NCCL_LIBRARY=str(nccl), **hosts)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        assert f"rank {rank} of 4 has checked everything" in result.stdout
        assert f"rank {rank} has called NCCL" in result.stdout
    assert "[nccl]" not in result.stderr


def test_one_process_that_cannot_join_is_not_waited_for(nccl: Path) -> None:
    variables = {"PERSEUS_NCCL_LIBRARY": str(nccl), "RANK_THAT_CANNOT_JOIN": "1"}
    result = run_ranks(3, nccl.with_name("libcuda.so.1"), **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "has called NCCL" not in result.stdout
    said = "NCCL does not join the ranks of this host, whose tensors go through host memory: "
    worlds = 2
    said += "unhandled system error (standin_nccl_fail_init())"
    assert result.stderr.count(said) == worlds, result.stderr


def test_missing_nccl_is_said_once_for_a_host(driver: Path) -> None:
    result = run_ranks(3, driver)
    worlds = 2
    assert result.stderr.count("[nccl] NCCL cannot be opened") == worlds, result.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("STANDIN_NCCL_VERSION", "21703", "is NCCL 2.17.3: install 2.18.0 or newer"),
        ("NCCL_COMM_BLOCKING", "1", "NCCL_COMM_BLOCKING=1 makes NCCL's calls block"),
    ],
)
def test_nccl_that_does_not_serve_is_said_and_done_without(
    nccl: Path, variable: str, value: str, said: str
) -> None:
    variables = {"PERSEUS_NCCL_LIBRARY": str(nccl), variable: value}
    result = run_ranks(2, nccl.with_name("libcuda.so.1"), **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert said in result.stderr
    assert "has called NCCL" not in result.stdout


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
    assert "NVIDIA's driver serves CUDA 12.4; GPUs of this host: 4\n" in result.stdout
    assert "    [ ] NCCL\n" in result.stdout
    assert "No NCCL: [nccl] NCCL cannot be opened (libnccl.so.2: " in result.stdout
    assert "install nvidia-nccl-cu13 or nvidia-nccl-cu12" in result.stdout


def test_check_build_tells_of_nccl(nccl: Path) -> None:
    command = [sys.executable, "-m", "perseus.run", "--check-build"]
    result = run(command, LD_LIBRARY_PATH=str(nccl.parent))
    assert "    [X] NCCL\n" in result.stdout
    assert "NCCL 2.28.7: libnccl.so.2\n" in result.stdout


def test_old_driver_is_one_clear_error(driver: Path) -> None:
    result = run(
        [sys.executable, "-c", SUBMIT, str(RANKS.parents[1]), str(driver)],
        STANDIN_CUDA_VERSION="11020",
    )
    assert "[cuda] NVIDIA's driver serves CUDA 11.2: install one for CUDA 11.4" in result.stdout
