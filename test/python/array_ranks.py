"""What test_arrays.py has its ranks do: arrays of NumPy and of a stand-in GPU, together."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray
from standins.gpu import Gpu

import perseus
import perseus.arrays as hvd

COUNT = 1000


def values_of(rank: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Differ per rank and index; sums of four are exact in every dtype."""
    return (np.arange(np.prod(shape)).reshape(shape) % 13 + rank).astype(dtype)


def check_dtypes(gpu: Gpu) -> None:
    """In place and into another array; rank 0 on its GPU, the others on their CPUs, and all."""
    for dtype in ("f2", "f4", "f8", "u1", "i1", "i2", "i4", "i8"):
        expected = sum(values_of(r, dtype, (COUNT,)).astype("i8") for r in range(hvd.size()))
        for everywhere in (True, False):
            own = values_of(hvd.rank(), dtype, (COUNT,))
            on_gpu = everywhere or hvd.rank() == 0
            array: Any = gpu.array(own) if on_gpu else own.copy()
            assert hvd.allreduce(array, op=hvd.Sum) is array
            result = array.numpy() if on_gpu else array
            assert np.array_equal(result.astype("i8"), expected), (dtype, everywhere)
            array, out = (gpu.array(own), gpu.array(own)) if on_gpu else (own, own.copy())
            assert hvd.allreduce(array, op=hvd.Sum, out=out) is out
            result = out.numpy() if on_gpu else out
            assert np.array_equal(result.astype("i8"), expected), (dtype, everywhere)
            kept = array.numpy() if on_gpu else array
            assert np.array_equal(kept, values_of(hvd.rank(), dtype, (COUNT,)))


def check_order_of_memory(gpu: Gpu) -> None:
    """Columns first on a CPU; gaps are refused, and so is what cannot be written."""
    own = values_of(hvd.rank(), "f4", (10, 20))
    expected = sum(values_of(r, "f4", (10, 20)) for r in range(hvd.size())) / hvd.size()
    array = np.asfortranarray(own)
    assert np.array_equal(hvd.allreduce(array), expected)
    refused(ValueError, lambda: hvd.allreduce(np.zeros((8, 8), "f4")[::2]), "contiguous")
    fixed = own.copy()
    fixed.flags.writeable = False
    refused(ValueError, lambda: hvd.allreduce(fixed), "read-only")
    assert np.array_equal(hvd.allreduce(fixed, out=np.empty_like(own)), expected)
    refused(TypeError, lambda: hvd.allreduce([1.0, 2.0]), "expected an array, got list")
    refused(ValueError, lambda: hvd.allreduce(np.zeros(4, "c8")), "arrays of <c8")
    refused(ValueError, lambda: hvd.allreduce(np.zeros(4, ">f4")), "arrays of >f4")
    refused(
        ValueError,
        lambda: hvd.allreduce(gpu.array(own), out=own.copy()),
        "not on the same device and stream",
    )


class ByDlpackAlone:
    """What has no interface of NumPy's, such as JAX's arrays."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


def check_dlpack() -> None:
    for dtype in ("f2", "f4", "f8", "u1", "i4", "i8"):
        own = values_of(hvd.rank(), dtype, (10, 20))
        expected = sum(values_of(r, dtype, (10, 20)).astype("i8") for r in range(hvd.size()))
        for array in (own.copy(), np.asfortranarray(own)):
            wrapped = ByDlpackAlone(array)
            assert hvd.allreduce(wrapped, op=hvd.Sum) is wrapped
            assert np.array_equal(array.astype("i8"), expected), dtype
    refused(ValueError, lambda: hvd.allreduce(ByDlpackAlone(np.zeros(4, "c8"))), "not supported")


def check_many_at_once(gpu: Gpu) -> None:
    """Each is computed late, and its result is used by the stream at once."""
    arrays = [gpu.array(values_of(hvd.rank() + i, "f4", (100 * i + 1,))) for i in range(20)]
    handles = [hvd.allreduce_async(a, f"a{i}", hvd.Sum) for i, a in enumerate(arrays)]
    for i, (array, handle) in enumerate(zip(arrays, handles, strict=True)):
        assert hvd.synchronize(handle) is array

        def twice(array: Any = array) -> None:
            array.seen_by_kernels()[:] *= 2

        gpu.launch(twice)
        sums = sum(values_of(r + i, "f4", (100 * i + 1,)) for r in range(hvd.size()))
        assert np.array_equal(array.numpy(), 2 * sums)
    done = hvd.allreduce_async(arrays[0], "last")
    hvd.synchronize(done)
    refused(ValueError, lambda: hvd.poll(done), "was not created or has been cleared")


def check_large(gpu: Gpu) -> None:
    """What hosts exchange in stages, and NCCL, where it is there, sums inside them."""
    for step in range(3):
        array = gpu.array(values_of(hvd.rank() + step, "f4", (60_000,)))
        hvd.allreduce(array, "large", op=hvd.Sum)
        sums = sum(values_of(r + step, "f4", (60_000,)) for r in range(hvd.size()))
        assert np.array_equal(array.numpy(), sums)


def prepare_nccl() -> None:
    """One rank may be told that it cannot join the others."""
    library = os.environ.get("PERSEUS_NCCL_LIBRARY")
    if library and os.environ.get("RANK_THAT_CANNOT_JOIN") == str(hvd.rank()):
        ctypes.CDLL(library).standin_nccl_fail_init(2)


def nccl_calls() -> int:
    library = os.environ.get("PERSEUS_NCCL_LIBRARY")
    return int(ctypes.CDLL(library).standin_nccl_calls()) if library else 0


def check_next_world(gpu: Gpu) -> None:
    """NCCL joins the ranks of a world that follows another one, too."""
    before = nccl_calls()
    hvd.shutdown()
    hvd.init()
    check_large(gpu)
    assert (nccl_calls() > before) == (before > 0)
    if before > 0:
        print(f"rank {hvd.rank()} has called NCCL")


def check_broadcast(gpu: Gpu) -> None:
    for root in range(hvd.size()):
        array = gpu.array(values_of(hvd.rank(), "i4", (7, 3)))
        assert hvd.broadcast(array, root, "start") is array
        assert np.array_equal(array.numpy(), values_of(root, "i4", (7, 3)))


def refused(error: type[Exception], call: Any, text: str) -> None:
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"expected {error.__name__}: {text}")


def main() -> None:
    """Every check, on this rank."""
    refused(perseus.arrays.HorovodInternalError, lambda: hvd.allreduce(np.zeros(1)), "hvd.init")
    hvd.init()
    gpu = Gpu(Path(sys.argv[1]), hvd.rank() % 4)
    before = gpu.blocking_calls
    prepare_nccl()
    assert perseus.allreduce is hvd.allreduce
    check_dtypes(gpu)
    check_order_of_memory(gpu)
    check_dlpack()
    check_many_at_once(gpu)
    check_broadcast(gpu)
    check_large(gpu)
    check_next_world(gpu)
    assert gpu.blocking_calls == before
    print(f"rank {hvd.rank()} of {hvd.size()} has checked everything")
    hvd.shutdown()


main()
