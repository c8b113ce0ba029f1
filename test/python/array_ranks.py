"""What test_arrays.py has its ranks do: arrays of NumPy and of a stand-in GPU, together."""

from __future__ import annotations

import ctypes
import os
import sys
import time
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
    rows = np.zeros(4, [("x", "f4"), ("y", "u1")])
    rows["x"] = np.arange(4) + hvd.rank()
    refused(ValueError, lambda: hvd.allreduce(rows["x"]), "contiguous")
    assert rows["x"].tolist() == [i + hvd.rank() for i in range(4)]
    assert not rows["y"].any()
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


class Immutable(ByDlpackAlone):
    """Like JAX's arrays, which never change, and do not say so."""

    __module__ = "jaxlib._jax"

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class Unshared(ByDlpackAlone):
    """Like PyTorch's tensors that require gradients."""

    def __dlpack__(self, **arguments: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class Picture:
    """Like Pillow's images."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (2, 2), "typestr": "|u1", "version": 3, "data": bytes(4)}


def check_what_does_not_tell_of_its_memory() -> None:
    scalar = np.float32(hvd.rank() + 1)
    for out in (None, np.zeros((), "f4")):
        refused(TypeError, lambda out=out: hvd.allreduce(scalar, out=out), "np.array(x)")
    assert scalar == hvd.rank() + 1
    mean = (hvd.size() + 1) / 2
    assert hvd.allreduce(np.array(scalar)) == mean
    refused(TypeError, lambda: hvd.allreduce(Picture()), "got Picture, which does not tell")
    refused(TypeError, lambda: hvd.broadcast(Picture(), 0), "pass numpy.asarray(x)")
    unshared = Unshared(np.zeros(3, "f4"))
    refused(ValueError, lambda: hvd.allreduce(unshared), "does not share its memory: Can't export")
    refused(ValueError, lambda: hvd.broadcast(unshared, 0), "x.detach() or x.to_dense()")
    one = np.full(3, hvd.rank(), "f4")
    for given in ((one, one), None):
        for call in (hvd.allreduce, lambda given: hvd.broadcast(given, 0)):
            refused(TypeError, lambda f=call, g=given: f(g), "expected an array, got")
    refused(TypeError, lambda: hvd.allreduce(one, out=(one,)), "expected an array, got tuple")
    for text in ("O", "M8[s]", "m8[ns]", "U1", "V3"):
        refused(ValueError, lambda t=text: hvd.allreduce(np.zeros(3, t)), "are not supported")


def check_out() -> None:
    """It must be like the array; read-only arrays need it."""
    own = values_of(hvd.rank(), "f4", (10, 20))
    summed = sum(values_of(r, "f4", (10, 20)) for r in range(hvd.size()))
    last = hvd.size() - 1
    for make in (np.copy, Immutable, read_only):
        array, out = make(own), np.empty_like(own)
        assert hvd.allreduce(array, op=hvd.Sum, out=out) is out
        assert np.array_equal(out, summed)
        assert hvd.broadcast(array, last, out=out) is out
        assert np.array_equal(out, values_of(last, "f4", (10, 20)))
        if make is not np.copy:
            refused(ValueError, lambda a=array: hvd.allreduce(a), "read-only: pass out=")
            refused(ValueError, lambda a=array: hvd.broadcast(a, 0), "read-only: pass out=")
            refused(
                ValueError, lambda a=array: hvd.allreduce(own, out=a), "out is read-only: pass an"
            )
    assert np.array_equal(own, values_of(hvd.rank(), "f4", (10, 20)))
    for out in (np.empty(2, "f4"), np.empty((20, 10), "f4"), np.empty_like(own, order="F")):
        refused(ValueError, lambda o=out: hvd.allreduce(own, out=o), "differ in shape or memory")
    refused(ValueError, lambda: hvd.allreduce(own[1:], out=own[:-1]), "or overlap")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    fixed = array.copy()
    fixed.flags.writeable = False
    return fixed


def check_orders_that_differ() -> None:
    """Also of squares, whose shapes in memory are equal."""
    if hvd.size() == 1:
        return
    for shape in ((4, 4), (2, 3)):
        own = np.asarray(values_of(hvd.rank(), "f4", shape), order="F" if hvd.rank() else "C")
        for call in (hvd.allreduce, lambda array, name: hvd.broadcast(array, 0, name)):
            refused(
                hvd.HorovodInternalError,
                lambda f=call, o=own: f(o, f"order {o.shape}"),
                "memory layouts: One rank's tensor lies in memory by rows, but another rank's with",
            )
        assert np.array_equal(own, values_of(hvd.rank(), "f4", shape))


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
    """What an earlier world has done is given after it, and to nobody else; NCCL joins again."""
    before = nccl_calls()
    kept = [np.full(3, hvd.rank() + i, "f4") for i in range(2)]
    handles = [hvd.allreduce_async(a, f"kept{i}", hvd.Sum) for i, a in enumerate(kept)]
    while not all(map(hvd.poll, handles)):
        time.sleep(0.001)
    ranks = range(hvd.size())
    hvd.shutdown()
    assert hvd.poll(handles[0])
    assert hvd.synchronize(handles[0]) is kept[0]
    assert [a.tolist() for a in kept] == [[sum(ranks) + i * len(ranks)] * 3 for i in range(2)]
    hvd.init()
    new = [hvd.allreduce_async(np.zeros(1), f"new{i}") for i in range(2)]
    for handle in handles:
        assert handle not in new
        refused(ValueError, lambda h=handle: hvd.poll(h), "was not created or has been cleared")
    for handle in new:
        hvd.synchronize(handle)
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
    check_what_does_not_tell_of_its_memory()
    check_out()
    check_orders_that_differ()
    check_many_at_once(gpu)
    check_broadcast(gpu)
    check_large(gpu)
    check_next_world(gpu)
    assert gpu.blocking_calls == before
    print(f"rank {hvd.rank()} of {hvd.size()} has checked everything")
    hvd.shutdown()


main()
