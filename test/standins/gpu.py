"""Arrays on the stand-in for NVIDIA's driver; builds that, and the one for NCCL."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compile_driver(directory: Path) -> Path:
    """The stand-in as a library: whoever has loaded it finds it by the driver's name."""
    library = directory / "libcuda.so.1"
    here = Path(__file__).parent
    sources = [str(here / "cuda_driver.cc"), str(here / "cuda_kernels.cc")]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    headers = f"-I{here.parents[1] / 'common'}"
    subprocess.run([*command, headers, "-o", str(library), *sources, "-lpthread"], check=True)
    return library


def compile_nccl(driver: Path) -> Path:
    """The stand-in for NCCL, beside that for the driver."""
    library = driver.with_name("libnccl.so.2")
    source = Path(__file__).with_name("nccl.cc")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
    links = [str(driver), f"-Wl,-rpath,{driver.parent}", "-lpthread", "-lrt"]
    subprocess.run([*command, "-o", str(library), str(source), *links], check=True)
    return library


class Gpu:
    """One GPU of this process, and a stream that has all its work."""

    def __init__(self, driver: Path, number: int) -> None:
        self.number = number
        self._cuda = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
        self._cuda.standin_view.restype = ctypes.c_void_p
        self._cuda.standin_view.argtypes = [ctypes.c_ulonglong]
        context = ctypes.c_void_p()
        assert self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number) == 0
        assert self._cuda.cuCtxPushCurrent_v2(context) == 0
        self._stream = ctypes.c_void_p()
        assert self._cuda.cuStreamCreateWithPriority(ctypes.byref(self._stream), 1, 0) == 0
        self._kernels: list[Any] = []  # what the stream calls must live until it has

    def array(self, values: NDArray[Any]) -> GpuArray:
        """An array that the stream fills, late."""
        made = GpuArray(self, values.shape, values.dtype)
        values = values.copy()
        self.launch(lambda: np.copyto(made.seen_by_kernels(), values))
        return made

    def launch(self, kernel: Any) -> None:
        """What a kernel does, after all that the stream has to do before."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: kernel())
        self._kernels.append(call)
        assert self._cuda.cuLaunchHostFunc(self._stream, call, None) == 0

    def synchronize(self) -> None:
        assert self._cuda.cuStreamSynchronize(self._stream) == 0

    def allocate(self, size: int) -> tuple[int, int]:
        """(address, where kernels see it)."""
        address = ctypes.c_ulonglong()
        assert self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return address.value, self._cuda.standin_view(address)

    @property
    def stream(self) -> int:
        return self._stream.value or 0

    @property
    def blocking_calls(self) -> int:
        """How often the host has waited for the GPU."""
        return int(self._cuda.standin_blocking_calls())


class GpuArray:
    """An array in a GPU's memory, as CuPy or Numba show theirs."""

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.gpu, self.shape, self.dtype = gpu, shape, dtype
        size = int(np.prod(shape)) * dtype.itemsize
        self._address, view = gpu.allocate(size)
        self._view = (ctypes.c_char * size).from_address(view)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "stream": self.gpu.stream,
            "version": 3,
        }

    def seen_by_kernels(self) -> NDArray[Any]:
        return np.frombuffer(self._view, self.dtype).reshape(self.shape)

    def numpy(self) -> NDArray[Any]:
        """The values, once the stream has done everything."""
        values = np.empty(self.shape, self.dtype)
        self.gpu.launch(lambda: np.copyto(values, self.seen_by_kernels()))
        self.gpu.synchronize()
        return values
