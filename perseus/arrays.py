"""Collectives on arrays of any framework, in host memory or on NVIDIA GPUs.

    import perseus.arrays as hvd

    hvd.init()
    hvd.allreduce(gradient, name="layer1.weight")

An array is whatever says where its elements are: by `__cuda_array_interface__` (CuPy, Numba,
PyTorch), by `__array_interface__` (NumPy), or by DLPack (JAX, PyTorch, and most others). Results
are written into arrays of the caller. For an array that must not be changed, such as one of JAX's,
pass `out=`.

On a GPU, a call waits for the work that the array's stream was given before, and work that it is
given later waits for the result; the host waits for other ranks only. DLPack does not name the
stream of an array: its producer makes the legacy default stream wait for it, and it is that stream
which waits for the result.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any

from perseus import basics
from perseus.arguments import checked_op, checked_root
from perseus.basics import (
    abort,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from perseus.errors import NOT_INITIALIZED, HorovodInternalError
from perseus.operations import Kind, ReduceOp
from perseus.process_sets import ProcessSet, global_process_set, number_of

if TYPE_CHECKING:
    from perseus import _core

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "abort",
    "allreduce",
    "allreduce_async",
    "broadcast",
    "broadcast_async",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

# NumPy's type strings without the byte order -> enum perseus_dtype.
_DTYPES = {
    "f2": 0,
    "f4": 2,
    "f8": 3,
    "u1": 4,
    "i1": 5,
    "i2": 6,
    "i4": 7,
    "i8": 8,
    "b1": 9,
}
_BFLOAT16 = 1
_PER_THREAD_STREAM = 2

# DLPack's numbers.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_LEGACY_STREAM = 1
# (kind, bits) -> enum perseus_dtype.
_DLPACK_DTYPES = {
    (2, 16): 0,
    (4, 16): 1,
    (2, 32): 2,
    (2, 64): 3,
    (1, 8): 4,
    (0, 8): 5,
    (0, 16): 6,
    (0, 32): 7,
    (0, 64): 8,
    (6, 8): 9,
}


class _DlTensor(ctypes.Structure):
    """DLTensor of DLPack: what a capsule named "dltensor" begins with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # null: by rows
        ("byte_offset", ctypes.c_uint64),
    )


class _DlVersioned(ctypes.Structure):
    """DLManagedTensorVersioned: what a capsule named "dltensor_versioned" holds."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DlTensor),
    )


_READ_ONLY = 1  # of the flags

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = [ctypes.py_object]


def allreduce(
    array: Any,
    name: str | None = None,
    op: int = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Any = None,
) -> Any:
    """Reduce an array over all ranks, in place or into `out`, and return where the result is.

    array: any shape and memory order without gaps, equal on all ranks; float16, bfloat16, float32,
    float64, (u)int8, int16, int32, int64 or bool. name: pairs the operation across ranks; None =
    by the order of unnamed ones. out: an array of the same shape, memory order, dtype and device,
    with memory of its own.

    Raises ValueError for an array that cannot be served, TypeError for what is no array, and
    HorovodInternalError if the operation fails.
    """
    handle = allreduce_async(
        array, name, op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set, out=out,
    )  # fmt: skip
    return synchronize(handle)


def allreduce_async(
    array: Any,
    name: str | None = None,
    op: int = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Any = None,
) -> int:
    """Start allreduce(), and return a handle for synchronize()."""
    return _running().submit(
        Kind.ALLREDUCE, name, array, _target(array, out), op=checked_op(op, "arrays"),
        prescale=prescale_factor, postscale=postscale_factor, group=number_of(process_set),
    )  # fmt: skip


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: Any = None,
) -> Any:
    """Give every rank the elements of the root's array, in place or in `out`. See allreduce()."""
    return synchronize(broadcast_async(array, root_rank, name, process_set, out=out))


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: Any = None,
) -> int:
    """Start broadcast(), and return a handle for synchronize()."""
    return _running().submit(
        Kind.BROADCAST, name, array, _target(array, out), root=checked_root(root_rank, "arrays"),
        group=number_of(process_set),
    )  # fmt: skip


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. ValueError for an unknown handle."""
    return _latest().poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return the array that has its result; also after shutdown().

    On a GPU, later work on the array's stream sees the result.
    """
    return _latest().synchronize(handle)


class _Running:
    """The handles of the running world, or of the last one."""

    operations: _core.Operations | None = None

    def attach(self) -> None:
        operations = basics.operations(_refuse_result, _describe)
        if operations is not None:
            self.operations = operations


_world = _Running()
basics.at_init(_world.attach)


def _running() -> _core.Operations:
    if not basics.is_initialized():
        raise HorovodInternalError(NOT_INITIALIZED)
    return _latest()


def _latest() -> _core.Operations:
    if _world.operations is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _world.operations


def _refuse_result(*_: Any) -> Any:
    raise AssertionError("results have arrays of their own")


def _describe(array: Any) -> tuple[Any, ...]:
    """Address, shape, strides in elements and dtype; on a GPU, its number and the stream, too."""
    interface = _interface(array)
    if interface is None:
        return _described_by_dlpack(array)
    address = interface["data"][0]
    shape = tuple(interface["shape"])
    dtype, width = _dtype(array, interface["typestr"])
    steps = _steps(shape, interface.get("strides"), width)
    if not hasattr(array, "__cuda_array_interface__"):
        return address, shape, steps, dtype
    return address, shape, steps, dtype, _gpu(array), _stream(interface)


def _by_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array without gaps whose last dimension is the fastest."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _steps(shape: tuple[int, ...], strides: Any, width: int) -> tuple[int, ...]:
    """Strides in elements of `width` bytes, where None stands for an array by rows."""
    if strides is None:
        return _by_rows(shape)
    # Of a field of a structured array, elements may be anywhere.
    if any(n > 1 and stride % width for n, stride in zip(shape, strides, strict=True)):
        raise ValueError("Tensor is required to be contiguous.")
    return tuple(stride // width for stride in strides)


def _interface(array: Any) -> Any:
    """The interface that tells where the elements are; None if that is DLPack, or nothing."""
    try:
        on_gpu = getattr(array, "__cuda_array_interface__", None)
    except RuntimeError:  # PyTorch's, of a tensor that requires gradients
        on_gpu = None
    if on_gpu is None:
        return _host_interface(array)
    # Before version 3 it tells of no stream, and who knows when the elements are there is DLPack.
    return on_gpu if "stream" in on_gpu or not hasattr(array, "__dlpack__") else None


def _host_interface(array: Any) -> Any:
    """NumPy's interface; None without one, TypeError if it does not tell of the array's memory."""
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        return None
    kind = type(array).__name__
    if "__ref" in interface:  # to a copy, of which it tells
        raise TypeError(
            f"[arrays] expected an array, got {kind}, a scalar without memory of its own: pass "
            "np.array(x)"
        )
    if not isinstance(interface.get("data"), tuple):  # (address, whether it is read-only)
        raise TypeError(
            f"[arrays] expected an array, got {kind}, which does not tell where its elements are: "
            "pass numpy.asarray(x)"
        )
    return interface


def _no_array(given: Any) -> TypeError:
    return TypeError(
        f"[arrays] expected an array, got {type(given).__name__}, which has neither "
        "__cuda_array_interface__ nor __array_interface__ nor __dlpack__"
    )


def _exported(array: Any) -> tuple[_DlTensor, bool, Any]:
    """(what DLPack tells, whether it is read-only, the capsule that keeps both)."""
    if not hasattr(array, "__dlpack__"):
        raise _no_array(array)
    kind = int(array.__dlpack_device__()[0])
    if kind not in {_CPU, _CUDA, _CUDA_HOST}:
        raise ValueError(f"[arrays] DLPack's device {kind} is neither a CPU nor NVIDIA's")
    arguments = {"stream": _LEGACY_STREAM} if kind == _CUDA else {}
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0), **arguments)
        except TypeError:  # from before DLPack 1.0
            capsule = array.__dlpack__(**arguments)
    except (BufferError, RuntimeError) as error:  # PyTorch's were RuntimeErrors once
        raise ValueError(
            f"[arrays] {type(array).__name__} does not share its memory: {error}; pass what does, "
            "for example x.detach() or x.to_dense()"
        ) from error
    name = _name_of(capsule)
    pointer = _pointer_of(capsule, name)
    if name == b"dltensor":
        return _DlTensor.from_address(pointer), False, capsule
    versioned = _DlVersioned.from_address(pointer)
    return versioned.tensor, bool(versioned.flags & _READ_ONLY), capsule


def _described_by_dlpack(array: Any) -> tuple[Any, ...]:
    """As _describe. The array itself keeps the memory of which the capsule tells."""
    tensor, _, _capsule = _exported(array)
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _DLPACK_DTYPES.get((tensor.kind, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise ValueError(f"[arrays] arrays of {getattr(array, 'dtype', '?')} are not supported")
    steps = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _by_rows(shape)
    layout = (tensor.data or 0) + tensor.byte_offset, shape, steps, dtype
    return (*layout, tensor.device, 0) if tensor.device_type == _CUDA else layout


def _target(array: Any, out: Any) -> Any:
    """Where the result goes: `out`, or the array itself if that is None.

    ValueError if it must not be changed, as far as it says so; TypeError for what is no array.
    """
    if array is None or isinstance(array, tuple):  # means something else to the core
        raise _no_array(array)
    if out is None:
        if _read_only(array):
            raise ValueError("[arrays] the array is read-only: pass out=, which gets the result")
        return array
    if _read_only(out):
        raise ValueError("[arrays] out is read-only: pass an array that may be changed")
    return out


def _read_only(array: Any) -> bool:
    # JAX's arrays never change, but neither their interface nor an older capsule tells.
    if type(array).__module__.startswith("jax"):
        return True
    interface = _interface(array)
    if interface is not None:
        return bool(interface["data"][1])
    return hasattr(array, "__dlpack__") and _exported(array)[1]


def _dtype(array: Any, text: str) -> tuple[int, int]:
    """(enum perseus_dtype, bytes) of a NumPy type string."""
    if str(getattr(array, "dtype", "")) == "bfloat16":  # NumPy has no letter for it
        return _BFLOAT16, 2
    if text[0] == ">" or text[1:] not in _DTYPES:
        raise ValueError(f"[arrays] arrays of {text} are not supported")
    return _DTYPES[text[1:]], int(text[2:])


def _gpu(array: Any) -> int:
    """The number of the GPU, which DLPack tells; else -1, and the driver is asked."""
    return int(array.__dlpack_device__()[1]) if hasattr(array, "__dlpack_device__") else -1


def _stream(interface: dict[str, Any]) -> int:
    """The address of the stream that computes the array."""
    stream = interface.get("stream")
    if stream == _PER_THREAD_STREAM:
        return _PER_THREAD_STREAM
    return 0 if stream in (None, 1) else int(stream)
