"""Patch 2 compiles against the headers of cuDNN 9; nothing is linked or run: that takes a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from caffe_jobs import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

_CUDNN = "nvidia-cudnn-cu13==9.28.1.4"
_SOURCE = ROOT / "build" / "caffe" / "source"
_MADE = ROOT / "build" / "caffe" / "build"
# Caffe's headers name no more than these of two libraries that a bare CUDA compiler is without.
_OTHERS = {
    "cublas_v2.h": "typedef struct cublasContext *cublasHandle_t; typedef int cublasStatus_t;",
    "curand.h": "typedef struct curand *curandGenerator_t; typedef int curandStatus_t;",
}


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which("nvcc", path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin")
    if found is None:
        pytest.skip("NOT TESTED: patch 2 with cuDNN needs nvcc, of the CUDA toolkit")
    return found


@pytest.fixture(scope="module")
def cudnn() -> Path:
    """The folder of its headers, from the package on PyPI (0.5 GB); kept in build/cudnn."""
    folder = ROOT / "build" / "cudnn" / _CUDNN
    if not (folder / "cudnn.h").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", _CUDNN]
        done = subprocess.run(
            [*command, "--only-binary=:all:", f"--dest={folder}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"NOT TESTED: patch 2 with cuDNN: {_CUDNN} cannot be had: {done.stderr}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            for name in packed.namelist():
                if "/include/" in name and name.endswith(".h"):
                    (folder / Path(name).name).write_bytes(packed.read(name))
        wheel.unlink()
    return folder


@pytest.mark.parametrize(
    ("file", "calls"),
    [
        (
            "layers/cudnn_batch_norm_layer.cu",
            {"ForwardTraining", "ForwardInference", "Backward"},
        ),
        ("layers/cudnn_batch_norm_layer.cpp", set()),
        ("layer_factory.cpp", set()),
    ],
)
def test_the_layer_compiles(
    nvcc: str, cudnn: Path, tmp_path: Path, file: str, calls: set[str]
) -> None:
    for name, text in _OTHERS.items():
        (tmp_path / name).write_text(f"#pragma once\n{text}\n")
    folders = [_SOURCE / "include", _MADE, _MADE / "include", cudnn, tmp_path]
    folders.append(Path("/usr/include/hdf5/serial"))
    made = tmp_path / "made.o"
    command = [nvcc, "-std=c++17", "-O0", "-w", "-DUSE_CUDNN", *(f"-I{path}" for path in folders)]
    command += ["-c", str(_SOURCE / "src" / "caffe" / file), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    symbols = subprocess.run(["nm", str(made)], capture_output=True, text=True, check=True).stdout
    found = {line.split()[-1] for line in symbols.splitlines() if " U cudnnBatch" in line}
    assert found == {f"cudnnBatchNormalization{call}" for call in calls}
    assert "CuDNNBatchNormLayer" in symbols
