"""What a KVStore has under a key, and the weight that Compression.rotate averages for it.

Belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perseus.mxnet.kvstore_arguments import Key
from perseus.mxnet.master_weights import master_weight
from perseus.mxnet.rotation import Weight


@dataclass
class Value:
    """One key. array: dense or row-sparse, on the CPU. pushed: a gradient before its update.
    reduced: what the last push has written to. given_to: the parameters of this rank's devices that
    were broadcast into, which others update where the store has no updater. is_given_out: the value
    is not here, see KVStore.pushpull.
    """

    array: Any
    param_only: bool
    pushed: Any = None
    reduced: Any = None
    given_to: Sequence[Any] = ()
    is_given_out: bool = False


def weight_of(values: Mapping[Key, Value], updater: Any, key: Key) -> Weight:
    """Return the weight to average for a key: the stored one, or what others update."""
    held = values[key]
    if updater is None:
        first, *others = held.given_to
        return Weight(first, followers=others)
    optimizer = getattr(updater, "optimizer", None)
    state = None if optimizer is None else updater.states.get(key)
    master = master_weight(optimizer, held.array, state)
    # A pull follows every update, but none follows synchronize_parameters().
    readers = [array for array in held.given_to if array.stype == "default"]
    if master is None:
        return Weight(held.array, readers=readers)
    return Weight(master, followers=(held.array,), readers=readers)


def check_weight_is_known(key: Key, held: Value) -> None:
    """Raise ValueError if a store without an updater cannot average the weight of a gradient."""
    if not held.given_to:
        problem = "the store does not know this one"
        remedy = "or call broadcast(key, value, out=weight) instead of init, "
    elif any(np.dtype(array.dtype) == np.float16 for array in held.given_to):
        problem = "an optimizer that keeps float16 weights in float32 would overwrite the average"
        remedy = ""
    else:
        return
    raise ValueError(
        f"[kvstore] push of {key!r}: rotate and PERSEUS_DOWNSAMPLE_N_ELEMENTS average weights "
        f"instead of gradients, but {problem}: let the store update it (set_optimizer, "
        f"Trainer(update_on_kvstore=True), no MXNET_UPDATE_ON_KVSTORE=0), {remedy}or use another "
        f"compression; init(…, param_only=True) for what is no gradient"
    )
