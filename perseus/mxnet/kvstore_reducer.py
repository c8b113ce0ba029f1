"""What a KVStore does with pushed arrays before it stores or applies them.

They become one for all devices of a rank, then one for all ranks. Belongs to the thread that
trains.
"""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from typing import Any

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.compression import Compressor, SettingsCompressor
from perseus.gradients.outcome import Outcome
from perseus.gradients.plan import Plan
from perseus.mxnet import ops, sparse
from perseus.mxnet.kvstore_arguments import PerseusOp
from perseus.mxnet.reducer import GradientReducer


class StoreReducer:
    """Reduces what is pushed to one store.

    scope: what the names of its arrays begin with. compression: of gradients, equal on all ranks.
    `residuals` has what codecs hold back, by what follows the scope; to be read, and written after
    a forget(), while nothing is under way.
    """

    def __init__(self, scope: str, compression: type[Compressor] = SettingsCompressor) -> None:
        plan = Plan(op=PerseusOp.Sum, compression=compression)
        self._reducer = GradientReducer(plan, scope)
        self.residuals = self._reducer.residuals
        self.forget = self._reducer.forget

    def combine(
        self,
        given: list[Any],
        output: Any,
        name: str,
        *,
        op: PerseusOp,
        priority: int,
        gradient: bool,
    ) -> Outcome:
        """Have `output` become what the arrays of all ranks make, to be used where it is REDUCED.

        given: dense ones of its shape and dtype, for each device; the output may be the only one.
        gradient: of a parameter, so that settings for gradients apply. Waits only where these
        withhold some.
        """
        array = _joined(given, output, op)
        if gradient and np.dtype(output.dtype).kind in "fV":  # V: bfloat16
            return self._reducer([array], [name], [priority], outputs=[output]).together()
        ops.allreduce([array], [output], name, op=op, priority=priority)
        return Outcome.REDUCED

    def add_rows(
        self, given: list[Any], name: str, *, priority: int, gradient: bool
    ) -> tuple[Any, Outcome]:
        """The sum of row-sparse arrays as a new one, to be used where it is REDUCED; waits."""
        total = sparse.sum_rows(given, name, priority, self._reducer.number if gradient else 0)
        skips = gradient and basics.skips_nan_gradients()
        has_nan = skips and np.isnan(total.data.asnumpy()).any()
        return total, Outcome.SKIPPED if has_nan else Outcome.REDUCED


def settle(array: Any) -> None:
    """Return once an array is written, or has failed to be.

    For what comes next under the same name and is written elsewhere: the engine orders ops by their
    arrays, and a name has one op at a time.
    """
    with suppress(mx.base.MXNetError):
        array.wait_to_read()


def _joined(given: list[Any], output: Any, op: PerseusOp) -> Any:
    """The arrays of all devices as one on that of the output."""
    here = [array.as_in_context(output.context) for array in given]
    if op == PerseusOp.Sum and len(here) > 1:
        return mx.nd.add_n(*here)
    return reduce(mx.nd.maximum if op == PerseusOp.Max else mx.nd.minimum, here)
