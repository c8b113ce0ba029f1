"""What a KVStore does with pushed arrays before it stores or applies them.

They become one for all devices of a rank, then one for all ranks. Belongs to the thread that
trains.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.compression import Compressor, SettingsCompressor
from perseus.mxnet import ops, sparse
from perseus.mxnet.gradient_exchange import GradientExchange, Plan
from perseus.mxnet.kvstore_arguments import PerseusOp


class Pushes:
    """Of one store. compression: of its gradients, equal on all ranks."""

    def __init__(self, compression: type[Compressor] = SettingsCompressor) -> None:
        self._exchange = GradientExchange(Plan(op=PerseusOp.Sum, compression=compression))

    def combine(
        self,
        given: list[Any],
        output: Any,
        name: str,
        *,
        op: PerseusOp,
        priority: int,
        gradient: bool,
    ) -> bool:
        """Have `output` become what the arrays of all ranks make; False where it is not to be used.

        given: dense ones of its shape and dtype, for each device; the output may be the only one.
        gradient: of a parameter, so that settings for gradients apply. Waits only where these
        withhold some.
        """
        array = _joined(given, output, op)
        if gradient and np.dtype(output.dtype).kind in "fV":  # V: bfloat16
            return self._exchange([array], [name], [priority], outputs=[output]).applies()
        ops.allreduce([array], [output], name, op=op, priority=priority)
        return True

    def add_rows(
        self, given: list[Any], name: str, *, priority: int, gradient: bool
    ) -> tuple[Any, bool]:
        """The sum of row-sparse arrays as a new one, and whether it is to be used; waits."""
        total = sparse.sum_rows(given, name, priority, self._exchange.number if gradient else 0)
        withheld = gradient and basics.may_withhold_gradients()
        return total, not (withheld and np.isnan(total.data.asnumpy()).any())


def _joined(given: list[Any], output: Any, op: PerseusOp) -> Any:
    """The arrays of all devices as one on that of the output."""
    here = [array.as_in_context(output.context) for array in given]
    if op == PerseusOp.Sum and len(here) > 1:
        return mx.nd.add_n(*here)
    return reduce(mx.nd.maximum if op == PerseusOp.Max else mx.nd.minimum, here)
