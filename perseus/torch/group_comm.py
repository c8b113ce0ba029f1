"""Collectives on a subset of ranks: the base of data + model parallel training.

A GroupComm is a process set that registers itself and carries the collectives as methods. Groups
work concurrently and never wait for each other. One thread creates them; any thread may use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from perseus import basics
from perseus.process_sets import ProcessSet, register
from perseus.torch.data_movement import alltoall, barrier, broadcast, broadcast_
from perseus.torch.gather import allgather
from perseus.torch.reductions import allreduce, allreduce_
from perseus.torch.scatter import reducescatter
from perseus.torch.session import Average


class GroupComm(ProcessSet):
    """Some ranks of the world, and the collectives among them.

    ranks: global ranks. Making one is collective: every rank of the world makes the same groups in
    the same order, also those it is not in. It can be passed wherever a process_set is wanted, and
    ended with remove_process_set. Collectives are for members only; all but the in-place forms are
    differentiable. See ProcessSet and add_process_set for attributes and errors.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__(ranks)
        register(self)

    @classmethod
    def grid(cls, columns: int) -> tuple[GroupComm, GroupComm]:
        """Lay all ranks out in rows of `columns`; this rank's row and this rank's column.

        For data + model parallel training: a row shares one model, a column one shard of it.
        ValueError unless the number of ranks is a multiple of columns, with at least two of each
        (one row or one column would be the whole world).
        """
        size, rank = basics.size(), basics.rank()
        if columns < 2 or size % columns != 0 or size == columns:
            raise ValueError(
                f"[torch] grid({columns}): {size} ranks do not make two or more rows of it"
            )
        rows = [cls(range(first, first + columns)) for first in range(0, size, columns)]
        lines = [cls(range(first, size, columns)) for first in range(columns)]
        return rows[rank // columns], lines[rank % columns]

    def allreduce(
        self, tensor: torch.Tensor, op: int = Average, name: str | None = None
    ) -> torch.Tensor:
        """The reduction over the members."""
        return allreduce(tensor, op=op, name=name, process_set=self)

    def allreduce_(
        self, tensor: torch.Tensor, op: int = Average, name: str | None = None
    ) -> torch.Tensor:
        """The same in place."""
        return allreduce_(tensor, op=op, name=name, process_set=self)

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """The members' rows, joined in rank order."""
        return allgather(tensor, name=name, process_set=self)

    def reducescatter(
        self, tensor: torch.Tensor, op: int = Average, name: str | None = None
    ) -> torch.Tensor:
        """This member's rows of the reduction."""
        return reducescatter(tensor, op=op, name=name, process_set=self)

    def alltoall(self, tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
        """Exchange rows with every member; with splits (output, received_splits)."""
        return alltoall(tensor, splits=splits, name=name, process_set=self)

    def broadcast(
        self, tensor: torch.Tensor, root_rank: int, name: str | None = None
    ) -> torch.Tensor:
        """The values of root_rank, a global rank."""
        return broadcast(tensor, root_rank, name=name, process_set=self)

    def broadcast_(
        self, tensor: torch.Tensor, root_rank: int, name: str | None = None
    ) -> torch.Tensor:
        """The same in place."""
        return broadcast_(tensor, root_rank, name=name, process_set=self)

    def barrier(self) -> None:
        """Return once every member is here."""
        barrier(self)
