"""The learning rate by which codecs weigh what they have held back. Stateless."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mxnet as mx


def learning_rate(optimizer: Any, keys: Sequence[Any], rescale: float | None = None) -> float:
    """Return the factor of an optimizer's next update of keys, without parameters' own factors.

    Gradients are reduced as they are: a step divides them by its batch size and by its loss scale,
    both of which may be others in the next step. It also multiplies them by the rate if steps are
    proportional to both: those of SGD and NAG are, if they clip nothing, but others may not be,
    even if they are derived from these. Then the factor is negative; see perseus_request. It is 0,
    for what is not known, without an optimizer.

    rescale: what counts as `rescale_grad` of the next step; None = it is that already.
    """
    if not hasattr(optimizer, "rescale_grad"):
        return 0.0
    scale = float(optimizer.rescale_grad if rescale is None else rescale)
    proportional = type(optimizer) in {mx.optimizer.SGD, mx.optimizer.NAG}
    clips = proportional and optimizer.clip_gradient is not None
    return scale * float(_next_rate(optimizer, keys)) if proportional and not clips else -scale


def _next_rate(optimizer: Any, keys: Sequence[Any]) -> Any:
    """Return the rate of the next update of keys.

    A schedule may have a state that such a question changes, so a copy is asked. The update asks
    with a lower number if it leaves out the keys with the highest counts.
    """
    if optimizer.lr_scheduler is None:
        return optimizer.learning_rate
    counts, first = optimizer._index_update_count, optimizer.begin_num_update
    numbers = (counts.get(key, first) + 1 for key in keys)
    return copy.copy(optimizer.lr_scheduler)(max([optimizer.num_update, *numbers]))
