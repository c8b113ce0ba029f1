"""Compression.rotate for MXNet's weights: see perseus.gradients.turns.

A turn consists of ops: MXNet's engine sends weights once their updates are done, and corrects them
once the averages are there, before anything that is pushed later reads them. So no turn makes the
thread that trains wait. Errors are MXNetError at the next wait for a weight. Sparse weights, and
those with sparse gradients, take no turns: their gradients travel whole. Belongs to the thread that
trains.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.gradients.rotation import Rotation
from perseus.gradients.turns import rows_of
from perseus.mxnet import ops
from perseus.process_sets import ProcessSet


class Weight(NamedTuple):
    """A dense floating-point weight.

    array: what is averaged. followers: arrays that always have its values, such as a float16 weight
        of which an optimizer keeps `array` in float32. readers: arrays that get its values when
        all ranks are made equal. current: those of them that have its values now, and are to have
        them after a correction, too.
    """

    array: Any
    followers: Sequence[Any] = ()
    readers: Sequence[Any] = ()
    current: Sequence[Any] = ()


class _Pending(NamedTuple):
    """sent: the rows of one part, and a 1 at the end, which counts the ranks that take part."""

    part: int
    sent: Any
    total: Any


class WeightRotation(Rotation):
    """Averages weights as float32, or as float64 if there are weights of that type.

    weight_of: returns what a key's weight is at present, since states of optimizers are replaced
        when they are loaded. keys_of: returns the keys that are made equal; None = those in use.
    """

    def __init__(
        self,
        weight_of: Callable[[Any], Weight],
        keys_of: Callable[[], Sequence[Any]] | None,
        name: str,
        process_set: ProcessSet,
        parts: int,
    ) -> None:
        self._weight_of = weight_of
        self._keys_of = keys_of
        self._keys: list[Any] = []
        super().__init__(f"rotate.{name}", process_set, parts)
        _living.add(self)

    def use(self, keys: Sequence[Any]) -> None:
        """Average the weights of these keys from now on; equal and in one order on all ranks."""
        if list(keys) != self._keys:
            self.finish()  # what is under way is cut into the weights that it was made of
            self._keys = list(keys)

    def settle(self) -> None:
        """See Turns."""
        self.finish()
        if self._keys_of is not None:
            self.use(self._keys_of())

    def drop(self) -> None:
        """See Turns."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(mx.base.MXNetError):
                pending.total.wait_to_read()

    def send(self, part: int) -> _Pending | None:
        """See Turns."""
        with mx.autograd.pause():
            arrays = [self._weight_of(key).array for key in self._keys]
            some = [array for array in arrays if math.prod(self._shape(array, part)) > 0]
            if not some:
                return None
            wide = np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32
            rows = [self._read(array, part).as_in_context(mx.cpu()) for array in some]
            flat = [array.astype(wide, copy=False).reshape((-1,)) for array in rows]
            # A rank that has joined sends zeros.
            sent = mx.nd.concat(*flat, mx.nd.ones((1,), mx.cpu(), dtype=wide), dim=0)
            total = ops.empty(sent)
            ops.allreduce(
                [sent], [total], f"{self.name}.{part}", op=ops.Sum, process_set=self.process_set
            )
        return _Pending(part, sent, total)

    def receive(self, pending: _Pending) -> Any:
        """See Turns; does not wait."""
        return mx.nd.broadcast_div(pending.total[:-1], pending.total[-1:])

    def correct(self, pending: _Pending) -> None:
        """See Turns; does not wait."""
        with mx.autograd.pause():
            difference = self.receive(pending) - pending.sent[:-1]
            for weight, piece in self._pieces(pending.part, difference):
                self._add(weight, pending.part, piece)

    def replace(self, pending: _Pending) -> None:
        """See Turns."""
        pending.total.wait_to_read()
        with mx.autograd.pause():
            for weight, piece in self._pieces(pending.part, self.receive(pending)):
                for array in (weight.array, *weight.followers, *weight.readers):
                    self._write(piece, array, pending.part)

    def _add(self, weight: Weight, part: int, difference: Any) -> None:
        rows = self._read(weight.array, part)
        given = difference.as_in_context(rows.context)
        # One rounding, in a type that all MXNet's operators know.
        total = rows.astype(given.dtype, copy=False) + given
        for array in (weight.array, *weight.followers, *weight.current):
            self._write(total, array, part)

    def _pieces(self, part: int, flat: Any) -> list[tuple[Weight, Any]]:
        """Cut a flat array into the rows of the weights of which the part has elements."""
        begin, found = 0, []
        for weight in map(self._weight_of, self._keys):
            shape = self._shape(weight.array, part)
            end = begin + math.prod(shape)
            if end > begin:
                found.append((weight, flat[begin:end].reshape(shape)))
            begin = end
        return found

    def _shape(self, array: Any, part: int) -> tuple[int, ...]:
        """Return the shape of a part; a scalar has one row."""
        count, *rest = array.shape or (1,)
        rows = rows_of(count, part, self.parts)
        return (rows.stop - rows.start, *rest)

    def _read(self, array: Any, part: int) -> Any:
        """Return a part's rows."""
        plain = _with_rows(array)
        rows = rows_of(plain.shape[0], part, self.parts)
        if _has_operators(plain):
            return mx.nd.slice_axis(plain, axis=0, begin=rows.start, end=rows.stop)
        return plain[rows]

    def _write(self, values: Any, array: Any, part: int) -> None:
        """Replace a part's rows."""
        plain = _with_rows(array)
        rows = rows_of(plain.shape[0], part, self.parts)
        given = values.as_in_context(plain.context).astype(plain.dtype, copy=False)
        if _has_operators(plain):
            place = {"begin": (rows.start,), "end": (rows.stop,)}
            mx.nd._internal._slice_assign(plain, given, out=plain, **place)
        else:
            given.copyto(plain[rows])


def _with_rows(array: Any) -> Any:
    """Return an NDArray of the same memory; that of a scalar has one row."""
    plain = array.as_nd_ndarray()
    return plain if plain.shape else plain.reshape((1,))


def _has_operators(array: Any) -> bool:
    """Return whether MXNet's operators know the dtype, as they do not know bfloat16.

    They serve arrays in a layout of oneDNN, too, in which inference leaves weights of convolutions,
    while views of such arrays can only be read.
    """
    return bool(np.dtype(array.dtype).kind == "f")


_living: weakref.WeakSet[WeightRotation] = weakref.WeakSet()


class _Attachment:
    """Waits for what is under way when the world ends."""

    def close(self) -> None:
        # Nobody reads it any more, so MXNet would raise its error at the end of the script.
        for rotation in list(_living):
            rotation.drop()


def _attach() -> None:
    basics.lend_context(_Attachment())


basics.at_init(_attach)
