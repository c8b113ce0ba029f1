"""What a KVStore has under a key, and the weight that Compression.rotate averages for it.

Belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perseus.mxnet.kvstore_arguments import Key
from perseus.mxnet.kvstore_reducer import is_floating
from perseus.mxnet.master_weights import master_weight
from perseus.mxnet.rotation import Weight


@dataclass
class Value:
    """One key. array: dense or row-sparse, on the CPU. pushed: a gradient before its update.
    reduced: what the last push has written to. given_to: the parameters of this rank's devices that
    were broadcast into, which others update where the store has no updater. given_before: those
    that the value before this one was broadcast into. up_to_date: those of given_to that have been
    pulled to since the last update. is_given_out: the value is not here, see KVStore.pushpull.
    """

    array: Any
    param_only: bool
    pushed: Any = None
    reduced: Any = None
    given_to: Sequence[Any] = ()
    given_before: Sequence[Any] = ()
    up_to_date: Sequence[Any] = ()
    is_given_out: bool = False

    def is_pulled_to(self, array: Any) -> None:
        """Let `up_to_date` have an array that has the value now, if it is one of `given_to`."""
        if any(array is given for given in self.given_to) and array.stype == "default":
            self.up_to_date = [*(other for other in self.up_to_date if other is not array), array]


def check_is_in_use(key: Key, held: Value, outs: Sequence[Any]) -> None:
    """Raise ValueError if one of these arrays belongs to the value that this one has replaced."""
    kept = [array for array in outs if not any(array is given for given in held.given_to)]
    if any(array is old for array in kept for old in held.given_before):
        raise ValueError(
            f"[kvstore] pull of {key!r} to a parameter whose value broadcast has replaced by "
            f"another one's: two trainers share this store, and both have keys from 0 on; give "
            f"each a store of its own, as kvstore='dist_sync_perseus' does"
        )


def weight_of(values: Mapping[Key, Value], updater: Any, key: Key) -> Weight:
    """Return the weight to average for a key: the stored one, or what others update."""
    held = values[key]
    if updater is None:
        first, *others = held.given_to
        return Weight(first, followers=others)
    optimizer = getattr(updater, "optimizer", None)
    state = None if optimizer is None else updater.states.get(key)
    master = master_weight(optimizer, held.array, state)
    # A pull follows every update, but none follows synchronize_parameters() or a turn.
    readers = [array for array in held.given_to if array.stype == "default"]
    if master is None:
        return Weight(held.array, (), readers, held.up_to_date)
    return Weight(master, (held.array,), readers, held.up_to_date)


def replace_weight(updater: Any, key: Key, old: Any, new: Any) -> None:
    """Let an updater of MXNet's go on with another array as the weight of a key.

    It keeps its state of the key, with the new weight as the float32 copy, unless that is of arrays
    with another shape or dtype, or of an optimizer whose state hides where the copy is.
    """
    if key not in updater.states:
        return
    master = None
    fits = (old.shape, old.dtype) == (new.shape, new.dtype)
    if fits:
        try:
            master = master_weight(updater.optimizer, new, updater.states[key])
        except ValueError:
            fits = False
    if master is not None:
        new.astype(master.dtype).copyto(master)
    if not fits:
        del updater.states[key], updater.states_synced[key]


def can_be_averaged(held: Value, given: Sequence[Any]) -> bool:
    """Return whether a key's weight can be averaged instead of these gradients of it."""
    dense = all(array.stype == "default" for array in (held.array, *given))
    return dense and is_floating(held.array)


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
