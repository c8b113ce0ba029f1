"""Reduces the arrays that are pushed to a KVStore, before it stores or applies them.

It combines the arrays of a rank's devices first, then those of all ranks. Belongs to the thread
that trains.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Any

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.compression import Compressor, SettingsCompressor
from perseus.gradients.outcome import Outcome
from perseus.gradients.plan import Plan
from perseus.gradients.scopes import Scope
from perseus.mxnet import ops, sparse
from perseus.mxnet.kvstore_arguments import PerseusOp
from perseus.mxnet.reducer import GradientReducer


class StoreReducer:
    """Reduces the arrays that are pushed to one store.

    scope: the prefix of its arrays' names.
    compression: for gradients; equal on all ranks.
    residuals: the residuals of lossy codecs, by keys of the store. Read them only while
        nothing is in flight, and call forget() before writing them.
    """

    def __init__(self, scope: Scope, compression: type[Compressor] = SettingsCompressor) -> None:
        self.plan = Plan(op=PerseusOp.Sum, compression=compression)
        self._scope = scope
        self._reducer = GradientReducer(self.plan, lambda: f"{scope.prefix()}.")
        self._summed: set[str] = set()  # keys with a sum over steps that is not complete
        self.residuals = self._reducer.residuals

    def encode_by(self, compression: type[Compressor]) -> None:
        """Use another encoding from now on: the core flushes what the last one has held back."""
        self.plan = self._reducer.plan = replace(self.plan, compression=compression)

    def begin_world(self) -> None:
        """See Lasting. The core's sums over steps have ended with the last world."""
        self._summed.clear()

    def forget(self) -> None:
        """See GradientReducer."""
        self._summed.clear()
        self._reducer.forget()

    def begin_anew(self, key: str) -> None:
        """Drop what is kept of a key's gradients, of which nothing may be in flight.

        A sum that is not complete is dropped with those of all other keys, which would otherwise be
        complete at another step.
        """
        if key in self._summed:
            self._summed.clear()
            with suppress(mx.base.MXNetError):  # of the steps before
                self._reducer.wait()
            self._reducer.forget_sums()
        self._reducer.drop(key)

    def combine(
        self,
        given: list[Any],
        output: Any,
        key: str,
        *,
        op: PerseusOp,
        priority: int,
        gradient: bool,
        rate: float,
    ) -> Outcome:
        """Reduce arrays over devices and ranks into `output`, to be used if REDUCED is returned.

        given: dense arrays with the output's shape and dtype, one for each device; the output may
            be the only one.
        gradient: whether it is a gradient of a parameter, so that settings for gradients apply. It
            waits only if these may withhold gradients.
        rate: see perseus_request.learning_rate.
        """
        array, name = _joined(given, output, op), self._name_of(key)
        if gradient and is_floating(output):
            outcomes = self._reducer(
                [array], [name], [priority], outputs=[output], learning_rate=rate
            )
            outcome = outcomes.together()
            (self._summed.add if outcome == Outcome.HELD else self._summed.discard)(key)
            return outcome
        ops.allreduce([array], [output], name, op=op, priority=priority)
        return Outcome.REDUCED

    def add_rows(
        self, given: list[Any], key: str, *, priority: int, gradient: bool
    ) -> tuple[Any, Outcome]:
        """Sum row-sparse arrays over devices and ranks, and wait for the result.

        Returns a new array, to be used if the outcome is REDUCED.
        """
        number = self._reducer.number if gradient else 0
        total = sparse.sum_rows(given, self._name_of(key), priority, number)
        skips = gradient and basics.skips_nan_gradients()
        has_nan = skips and np.isnan(total.data.asnumpy()).any()
        return total, Outcome.SKIPPED if has_nan else Outcome.REDUCED

    def _name_of(self, key: str) -> str:
        return f"{self._scope.prefix()}.{key}"


def is_floating(array: Any) -> bool:
    """Return whether settings for gradients apply to an array's dtype."""
    return np.dtype(array.dtype).kind in "fV"  # V: bfloat16


def settle(array: Any) -> None:
    """Wait until an array has been written, or writing it has failed.

    It must precede an op with the same name and another output: a name may have one op at a time,
    but the engine only orders ops that have an array in common.
    """
    with suppress(mx.base.MXNetError):
        array.wait_to_read()


def _joined(given: list[Any], output: Any, op: PerseusOp) -> Any:
    """Combine the arrays of all devices into one on the output's device."""
    if len(given) == 1 and given[0] is output:
        return output
    here = [array.as_nd_ndarray().as_in_context(output.context) for array in given]
    if op == PerseusOp.Sum and len(here) > 1:
        return mx.nd.add_n(*here)
    return reduce(mx.nd.maximum if op == PerseusOp.Max else mx.nd.minimum, here)
