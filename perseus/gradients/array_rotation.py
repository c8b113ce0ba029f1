"""Compression.rotate for frameworks whose arrays NumPy can read: see perseus.gradients.turns."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus import basics
from perseus.gradients.rotation import Rotation
from perseus.operations import Kind, ReduceOp

if TYPE_CHECKING:
    from perseus import _core

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Rows = list[Array]

_DTYPES = {np.dtype(np.float32): 2, np.dtype(np.float64): 3}  # enum perseus_dtype


class _Pending(NamedTuple):
    """sent: the rows of one part, and a 1 at the end, which counts the ranks that take part."""

    part: int
    sent: Array
    total: Array
    handle: int


class ArrayRotation(Rotation):
    """Averages parameters as float32, or as float64 if there are rows of that type."""

    @abstractmethod
    def rows(self, part: int) -> Rows:
        """Return what belongs to a part, of every parameter; arrays may be empty."""

    def shapes(self, part: int) -> list[tuple[int, ...]]:
        """Return the shapes of rows()."""
        return [array.shape for array in self.rows(part)]

    def pieces(self, part: int, flat: Array) -> list[Any]:
        """Cut a flat array, of which a last element is left over, as add() and put() take it."""
        return cut(flat, self.shapes(part))

    @abstractmethod
    def add(self, part: int, differences: list[Any]) -> None:
        """Add to what belongs to a part."""

    @abstractmethod
    def put(self, part: int, values: list[Any]) -> None:
        """Replace what belongs to a part."""

    def send(self, part: int) -> _Pending | None:
        """See Turns."""
        return self.send_rows(part, self.rows(part))

    def send_rows(self, part: int, rows: Rows) -> _Pending | None:
        """Start averaging these rows of a part."""
        if all(array.size == 0 for array in rows):
            return None
        dtype = np.result_type(np.float32, *(array.dtype for array in rows))
        # A rank that has joined sends zeros.
        sent = np.concatenate([*(array.reshape(-1) for array in rows), [1]], dtype=dtype)
        total = np.empty_like(sent)
        handle = _door.operations.submit(
            Kind.ALLREDUCE, f"{self.name}.{part}", sent, total,
            op=ReduceOp.Sum, group=self.process_set.process_set_id,
        )  # fmt: skip
        return _Pending(part, sent, total, handle)

    def receive(self, pending: _Pending) -> Array:
        """See Turns."""
        _door.operations.synchronize(pending.handle)
        pending.total[:] /= pending.total[-1].copy()
        return pending.total

    def difference(self, pending: _Pending) -> Array:
        """Receive, and return what the average differs by from what was sent."""
        return self.receive(pending) - pending.sent

    def correct(self, pending: _Pending) -> None:
        """See Turns."""
        self.add(pending.part, self.pieces(pending.part, self.difference(pending)))

    def replace(self, pending: _Pending) -> None:
        """See Turns."""
        self.put(pending.part, self.pieces(pending.part, self.receive(pending)))


def cut(flat: Array, shapes: list[tuple[int, ...]]) -> Rows:
    """Return arrays of these shapes from the front of a flat one."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    pieces = np.split(flat[: ends[-1]], ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class _Door:
    """The handles of the running world's exchanges of arrays."""

    operations: _core.Operations

    def attach(self) -> None:
        operations = basics.operations(lambda *_: None, _describe)
        if operations is not None:
            self.operations = operations


def _describe(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return array.ctypes.data, array.shape, (1,), _DTYPES[array.dtype]


_door = _Door()
basics.at_init(_door.attach)
