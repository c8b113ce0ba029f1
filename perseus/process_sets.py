"""Sets of ranks on which collectives can run; one class, shared by all frameworks.

Only the global set exists so far. A set's id is the core's group number, and every collective
passes it on. Not synchronised: sets change inside init() and shutdown() only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perseus import basics


class ProcessSet:
    """A set of ranks.

    ranks_or_comm: the global ranks, in any order. Communicators of mpi4py need an MPI build.

    Attributes: process_set_id (None until registered), ranks (sorted), mpi_comm (always None).
    Raises ValueError for anything that is not a list of whole numbers.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"[process_sets] expected a list of ranks, got {ranks_or_comm!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """How many ranks it has; None while it is not registered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """This process's index in it; None while it is not registered, ValueError for outsiders."""
        members = self._members()
        if members is None:
            return None
        if basics.rank() not in members:
            raise ValueError("Process is not part of provided process set.")
        return members.index(basics.rank())

    def included(self) -> bool | None:
        """Whether this process belongs to it; None when the ranks are unknown."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    def _members(self) -> list[int] | None:
        if self.process_set_id is None:
            return None
        members = basics.group_ranks(self.process_set_id)
        if members is None:
            raise ValueError(f"[process_sets] {self} does not exist any more")
        return members


def _make_global() -> ProcessSet:
    whole = ProcessSet([])
    whole.process_set_id = 0
    whole.ranks = None
    return whole


global_process_set = _make_global()


def _fill_global() -> None:
    global_process_set.ranks = list(range(basics.size()))


basics.at_init(_fill_global)
