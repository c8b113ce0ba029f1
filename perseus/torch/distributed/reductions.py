"""torch's reductions in terms of the core's. Pure functions, thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from perseus.operations import ReduceOp
from perseus.torch.session import DTYPES

RedOpType: Any = dist.ReduceOp.RedOpType

_CORE_OPS = {
    RedOpType.SUM: ReduceOp.Sum,
    RedOpType.AVG: ReduceOp.Average,
    RedOpType.PREMUL_SUM: ReduceOp.Sum,
    RedOpType.PRODUCT: ReduceOp.Product,
    RedOpType.MIN: ReduceOp.Min,
    RedOpType.MAX: ReduceOp.Max,
}
# bool has no bits but one.
_BOOL_OPS = {RedOpType.BAND: ReduceOp.Min, RedOpType.BOR: ReduceOp.Max}
BITWISE = {
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
# A complex number is reduced as its two parts.
_COMPLEX_OPS = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)


class Reduction(NamedTuple):
    """What the core does with a tensor."""

    op: ReduceOp
    prescale: float = 1.0
    in_parts: bool = False  # a complex number as its two parts


def kind_of(reduce_op: Any) -> Any:
    """The RedOpType of a ReduceOp, which torch hands over in either form."""
    return getattr(reduce_op, "op", reduce_op)


def core_reduction(reduce_op: Any, dtype: torch.dtype) -> Reduction | None:
    """How the core reduces tensors of `dtype` in this way; None where it cannot, and BITWISE can.

    Raises ValueError for a reduction that is not defined for the dtype.
    """
    number = _number_of(reduce_op)
    try:
        known = _known[number, dtype]
    except KeyError:
        known = _known[number, dtype] = _reduction(kind_of(reduce_op), dtype)
    if number != _PREMUL_SUM or known is None:
        return known
    return known._replace(prescale=_factor(reduce_op))


_PREMUL_SUM = RedOpType.PREMUL_SUM.value
_known: dict[tuple[int, torch.dtype], Reduction | None] = {}
# Asked for every collective. torch's own hash is the number, and takes a third of the time.
_number_of: Callable[[Any], int] = (
    hash
    if all(hash(dist.ReduceOp(kind)) == hash(kind) == kind.value for kind in BITWISE)
    else lambda reduce_op: kind_of(reduce_op).value
)


def _reduction(kind: Any, dtype: torch.dtype) -> Reduction | None:
    if dtype == torch.bool and kind in _BOOL_OPS:
        return Reduction(_BOOL_OPS[kind])
    if kind in BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise ValueError(f"[torch] {kind.name} is defined for integers, not for {dtype}")
        return None
    if dtype.is_complex and kind not in _COMPLEX_OPS:
        raise ValueError(f"[torch] {kind.name} is not defined for {dtype}: use SUM or AVG")
    if kind not in _CORE_OPS or (dtype not in DTYPES and not dtype.is_complex):
        raise ValueError(f"[torch] {kind.name} is not defined for {dtype}")
    return Reduction(_CORE_OPS[kind], in_parts=dtype.is_complex)


def _factor(premultiplied_sum: Any) -> float:
    factor = premultiplied_sum.__getstate__()[1]
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise ValueError("[torch] PREMUL_SUM takes one factor, a number or a tensor of one element")
    return float(factor)
