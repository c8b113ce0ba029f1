"""Collectives on values, as in horovod.keras; results are tensors of Keras's framework.

Stateless. Source of behaviour: Horovod 0.28.1, horovod.keras, except that allreduce takes op.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from typing import Any

from perseus.compat.common.extensions import get_average_backwards_compatibility_fun
from perseus.compression import Compressor
from perseus.keras.backend import backend

_resolve_op = get_average_backwards_compatibility_fun(backend)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = backend.Compression.none,
) -> Any:
    """The reduction of a value over all ranks; the mean unless op says otherwise.

    value: a tensor, array or number; equal shapes and dtypes on all ranks. name: matches
    the ranks' calls; without one, ranks must call in the same order. average: Horovod's deprecated
    form of op.
    """
    return backend.allreduce(
        value, name, _resolve_op(op, average), prescale_factor, postscale_factor, compression
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' values concatenated along the first axis, whose length may differ."""
    return backend.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank; shapes and dtypes are equal."""
    return backend.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = backend.Average) -> Any:
    """This rank's rows of the reduction, divided in rank order; low ranks get the remainder."""
    return backend.reducescatter(value, name, op)


def broadcast_global_variables(root_rank: int) -> Any:
    """Give TensorFlow 1's global variables the root's values.

    RuntimeError if there are none; then use BroadcastGlobalVariablesCallback.
    """
    return backend.broadcast_global_variables(root_rank)
