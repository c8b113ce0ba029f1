"""Finds the float32 weights that MXNet's optimizers keep of float16 ones. Stateless."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

_OWN = mx.optimizer.Optimizer.create_state_multi_precision


def master_weight(optimizer: Any, weight: Any, state: Any) -> Any:
    """Return the float32 weight in an optimizer's state, of which `weight` is a copy; else None.

    Every update overwrites a float16 weight with it if the optimizer has multi_precision. Raises
    ValueError for an optimizer whose state does not have it in one of MXNet's places.
    """
    if state is None or np.dtype(weight.dtype) != np.float16 or not optimizer.multi_precision:
        return None
    # The base class puts it first. SGD, NAG and LARS, which override the method, put it second.
    place = 0 if type(optimizer).create_state_multi_precision is _OWN else 1
    found = state[place] if isinstance(state, list | tuple) and len(state) > place else None
    if not isinstance(found, mx.nd.NDArray) or np.dtype(found.dtype) != np.float32:
        raise ValueError(
            f"[rotate] {type(optimizer).__name__} has multi_precision, but its state does not hold "
            f"the float32 weight where those of MXNet's optimizers do: use another optimizer, or "
            f"another compression"
        )
    return found
