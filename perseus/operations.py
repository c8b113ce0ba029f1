"""The numbers of the C ABI that Python names: kinds of operations and reductions. Immutable."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """How values of ranks become one; enum perseus_reduce_op, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    # As integers are shown, on Python 3.10 too: names of tensors and messages contain these.
    __str__ = int.__repr__


class Kind(IntEnum):
    """What a request asks for; enum perseus_kind."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    ADD_GROUP = 6
    REMOVE_GROUP = 7
    JOIN = 8
    SEND = 9
    RECEIVE = 10

    __str__ = int.__repr__
