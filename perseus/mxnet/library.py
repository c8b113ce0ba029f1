"""The native part: finds libperseus_mxnet.so, and gives it MXNet's library and the world.

Ops are described by `Op` and pushed onto MXNet's engine, which runs them in the order in which
their arrays are used. Thread-safe after import.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perseus import basics
from perseus.installed import remedy, require, require_served
from perseus.operations import Kind

path = Path(__file__).resolve().parent.parent / "libperseus_mxnet.so"

ALLREDUCE = Kind.ALLREDUCE
ALLGATHER = Kind.ALLGATHER
BROADCAST = Kind.BROADCAST
ALLTOALL = Kind.ALLTOALL
REDUCESCATTER = Kind.REDUCESCATTER


class Op(ctypes.Structure):
    """A collective, see frameworks/mxnet/op.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("grouped", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("group", ctypes.c_int),
        ("op", ctypes.c_int),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("root", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("gradient_of", ctypes.c_uint64),
        ("codec", ctypes.c_int),
        ("codec_argument", ctypes.c_double),
        ("learning_rate", ctypes.c_double),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("outcome", ctypes.c_void_p),
        ("splits", ctypes.c_void_p),
        ("split_count", ctypes.c_int),
    )


def _import_mxnet() -> Any:
    """MXNet; ImportError if it is missing, or its version has another engine."""
    require("mxnet")
    import mxnet

    require_served("mxnet", mxnet.__version__)
    return mxnet


def _load() -> tuple[Any, Any]:
    """MXNet, and the library's functions."""
    mxnet = _import_mxnet()
    if not path.exists():
        raise ImportError(f"[mxnet] {path} is missing: {remedy()}")
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    out = ctypes.POINTER
    numbers = out(ctypes.c_int64)
    for name, result, arguments in (
        ("error", ctypes.c_char_p, []),
        ("load", number, [pointer]),
        ("attach", None, [pointer]),
        ("detach", None, []),
        ("push", number, [out(Op), number]),
        ("gather", number, [out(Op), out(pointer)]),
        (
            "gathered_describe",
            number,
            [pointer, number, out(number), out(numbers), out(number), out(numbers)],
        ),
        ("gathered_copy", number, [pointer, number, pointer]),
        ("gathered_free", None, [pointer]),
    ):
        function = getattr(library, f"perseus_mxnet_{name}")
        function.restype, function.argtypes = result, arguments
    if library.perseus_mxnet_load(mxnet.base._LIB._handle) != 0:
        raise ImportError(
            f"[mxnet] MXNet {mxnet.__version__} has no function "
            f"{library.perseus_mxnet_error().decode()}: pip install mxnet==1.9.1"
        )
    return mxnet, library


class _Attachment:
    """The library's use of one world's context."""

    def close(self) -> None:
        native.perseus_mxnet_detach()


def _attach() -> None:
    native.perseus_mxnet_attach(basics.lend_context(_Attachment()))
    # Hooks run last in, first out: this one comes before that of basics, which ends the world.
    atexit.unregister(_finish)
    atexit.register(_finish)


def _finish() -> None:
    """Wait until MXNet's engine is idle, as MXNet does at the end of a script.

    The world must still exist then: a last step may not have been reduced yet.
    """
    if basics.is_initialized() and not hasattr(sys, "last_type"):
        mxnet.nd.waitall()


def handles(arrays: Sequence[Any]) -> Any:
    """The handles of NDArrays, for an Op's fields."""
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def _error() -> Exception:
    failure: Exception = mxnet.base.MXNetError(native.perseus_mxnet_error().decode())
    return failure


class Batch:
    """Ops with given outputs, which can be pushed together any number of times."""

    def __init__(self, ops: Sequence[Op]) -> None:
        # Beside each run of ops, what their pointers point to.
        self._runs = [((Op * len(run))(*run), run) for run in _runs_of(ops)]
        self.ops = [op for given, _ in self._runs for op in given]  # what push() passes on

    def push(self) -> None:
        """Push the ops to the engine, which keeps their arrays; returns at once.

        MXNetError for an invalid op; other errors are raised by the next wait for its outputs.
        """
        for given, run in self._runs:
            for op in run:
                op.staging.load()
            if native.perseus_mxnet_push(given, len(run)) != 0:
                raise _error()
            for op in run:
                op.staging.store()


def _runs_of(ops: Sequence[Op]) -> list[list[Op]]:
    """Divide ops so that none needs a copy of what an earlier op of its run has yet to store.

    Where arrays need no copies, MXNet's engine orders the ops of a run.
    """
    runs: list[list[Op]] = [[]]
    stored: set[int] = set()
    for op in ops:
        if stored & op.staging.loaded():
            runs.append([])
            stored.clear()
        runs[-1].append(op)
        stored |= op.staging.stored()
    return runs


class Gathered:
    """The results of a finished op whose outputs the core allocates. gather() creates it."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle

    def shape(self, index: int) -> tuple[int, ...]:
        """Of a result."""
        return self._describe(index)[0]

    def received_splits(self) -> tuple[int, ...]:
        """Of alltoall: the rows that came from each rank."""
        return self._describe(0)[1]

    def copy(self, index: int, array: Any) -> None:
        """Copy a result into a new array of its shape."""
        if native.perseus_mxnet_gathered_copy(self._handle, index, array.handle) != 0:
            raise _error()

    def _describe(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        dims, splits = ctypes.c_int(), ctypes.c_int()
        shape, received = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
        if native.perseus_mxnet_gathered_describe(
            self._handle, index, dims, shape, splits, received
        ):
            raise _error()
        return tuple(shape[: dims.value]), tuple(received[: splits.value])

    def __del__(self) -> None:
        native.perseus_mxnet_gathered_free(self._handle)


def gather(op: Op, arrays: Sequence[Any]) -> Gathered:
    """Run an op without outputs in the engine's order and wait for it. MXNetError where it fails.

    arrays: its inputs, which may carry an earlier op's error.
    """
    handle = ctypes.c_void_p()
    status = native.perseus_mxnet_gather(op, handle)
    if status == 1:
        for array in arrays:
            array.wait_to_read()
    if status != 0:
        raise _error()
    return Gathered(handle)


def _end_quietly() -> None:
    """After an uncaught exception, hide the errors that follow from it.

    Runs after the end of the world, which ends all ops, and before MXNet raises their errors.
    """
    if hasattr(sys, "last_type"):
        with suppress(mxnet.base.MXNetError):
            mxnet.nd.waitall()


mxnet, native = _load()
basics.at_init(_attach)
atexit.register(_end_quietly)
