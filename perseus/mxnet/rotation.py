"""Compression.rotate for MXNet's weights: see perseus.gradients.turns.

Reading a weight waits for the updates of the step before. Corrections are ops, which MXNet's engine
orders behind backward, which reads the weights, and before the next update. Sparse weights, and
those with sparse gradients, take no turns: their gradients travel whole. Belongs to the thread that
trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.gradients.array_rotation import Array, ArrayRotation, Rows
from perseus.gradients.participation import alone
from perseus.gradients.plan import Plan
from perseus.gradients.rotation import parts_of
from perseus.gradients.turns import rows_of
from perseus.mxnet.step_keys import StepKeys
from perseus.process_sets import ProcessSet


class Weight(NamedTuple):
    """A dense floating-point weight.

    array: what is averaged. followers: arrays that always have its values, such as a float16 weight
        of which an optimizer keeps `array` in float32. readers: arrays that get its values when
        all ranks are made equal.
    """

    array: Any
    followers: Sequence[Any] = ()
    readers: Sequence[Any] = ()


class WeightRotation(ArrayRotation):
    """weight_of: returns what a key's weight is at present, since states of optimizers are replaced
    when they are loaded.
    """

    def __init__(
        self, weight_of: Callable[[Any], Weight], name: str, process_set: ProcessSet, parts: int
    ) -> None:
        self._weight_of = weight_of
        self._keys: list[Any] = []
        super().__init__(f"rotate.{name}", process_set, parts)

    def use(self, keys: Sequence[Any]) -> None:
        """Average the weights of these keys from now on; equal and in one order on all ranks."""
        if list(keys) != self._keys:
            self.finish()  # what is under way is cut into the weights that it was made of
            self._keys = list(keys)

    def rows(self, part: int) -> Rows:
        """See ArrayRotation."""
        with mx.autograd.pause():
            return [self._read(self._weight_of(key).array, part) for key in self._keys]

    def shapes(self, part: int) -> list[tuple[int, ...]]:
        """See ArrayRotation."""
        return [self._shape(self._weight_of(key).array, part) for key in self._keys]

    def pieces(self, part: int, flat: Array) -> list[Any]:
        """See ArrayRotation. Return views, since MXNet is slow to fill arrays; None if empty."""
        whole, begin, found = mx.nd.array(flat, dtype=flat.dtype), 0, []
        for shape in self.shapes(part):
            end = begin + math.prod(shape)
            found.append(whole[begin:end].reshape(shape) if end > begin else None)
            begin = end
        return found

    def add(self, part: int, differences: list[Any]) -> None:
        """See ArrayRotation."""
        with mx.autograd.pause():
            for weight, difference in self._with(differences):
                rows = self._view(weight.array, part)
                given = difference.as_in_context(rows.context)
                if rows.dtype == given.dtype:
                    total = mx.nd.elemwise_add(rows, given, out=rows)
                else:
                    # One rounding, in a type that all MXNet's operators know.
                    total = rows.astype(given.dtype) + given
                    self._copy(total, weight.array, part)
                for array in weight.followers:
                    self._copy(total, array, part)

    def put(self, part: int, values: list[Any]) -> None:
        """See ArrayRotation."""
        with mx.autograd.pause():
            for weight, rows in self._with(values):
                for array in (weight.array, *weight.followers, *weight.readers):
                    self._copy(rows, array, part)

    def _with(self, pieces: list[Any]) -> list[tuple[Weight, Any]]:
        """Return the weights of which a part has elements, with these."""
        pairs = zip(self._keys, pieces, strict=True)
        return [(self._weight_of(key), piece) for key, piece in pairs if piece is not None]

    def _read(self, array: Any, part: int) -> Any:
        wide = np.float64 if array.dtype == np.float64 else np.float32
        shape = self._shape(array, part)
        if 0 in shape:
            return np.empty(shape, wide)
        return self._view(array, part).astype(wide, copy=False).asnumpy()

    def _shape(self, array: Any, part: int) -> tuple[int, ...]:
        """Return the shape of a part; a scalar has one row."""
        count, *rest = array.shape or (1,)
        rows = rows_of(count, part, self.parts)
        return (rows.stop - rows.start, *rest)

    def _view(self, array: Any, part: int) -> Any:
        """Return a part's rows, in the array's own memory."""
        plain = array.as_nd_ndarray()
        shape = plain.shape
        if not shape:
            plain, shape = plain.reshape((1,)), (1,)
        return plain[rows_of(shape[0], part, self.parts)]

    def _copy(self, values: Any, array: Any, part: int) -> None:
        view = self._view(array, part)
        values.astype(view.dtype, copy=False).copyto(view)


class WeightTurns:
    """The rotation of an optimizer, a trainer or a store, in worlds in which it averages weights.

    plan: whose compression decides that, together with the settings. name: see Rotation.
    weight_of: see WeightRotation.
    """

    def __init__(self, plan: Plan, name: str, weight_of: Callable[[Any], Weight]) -> None:
        self._plan = plan
        self._name = name
        self._weight_of = weight_of
        self._rotation: WeightRotation | None = None
        self._steps = StepKeys()
        self._known: set[Any] = set()
        self._has_turned = False
        if basics.is_initialized():
            parts_of(plan.compression)  # settings that exclude each other are an error here

    def rotation(self) -> WeightRotation | None:
        """Return the rotation of this world; None if gradients are averaged instead."""
        parts = parts_of(self._plan.compression)
        if parts == 1 or alone():
            self._rotation = None
        elif self._rotation is None or self._rotation.parts != parts:
            members = self._plan.process_set
            self._rotation = WeightRotation(self._weight_of, self._name, members, parts)
        return self._rotation

    def take(self, keys: Sequence[Any]) -> None:
        """Take a turn. Call it once in each step whose gradients are applied, before they are.

        keys: those of all weights that are trained.
        """
        rotation = self.rotation()
        if rotation is not None:
            rotation.use(keys)
            rotation.take_turn()

    def before_update(self, key: Any, applies: bool) -> None:
        """Take a turn before a step's first gradient is applied. Call it for each key of a step.

        A new key takes part from the next step on: the first step averages nothing, before which
        ranks have the same weights anyway.
        """
        if self._steps.begins(key):
            self._has_turned = False
        if applies and not self._has_turned:
            self._has_turned = True
            self.take(sorted(self._known, key=str))
        self._known.add(key)

    def finish(self) -> None:
        """See Turns."""
        if self._rotation is not None:
            self._rotation.finish()

    def drop(self) -> None:
        """See Turns."""
        if self._rotation is not None:
            self._rotation.drop()
