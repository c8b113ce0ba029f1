"""Sets of ranks on which collectives can run; one class, shared by all frameworks.

A set's id is the core's group number, and every collective passes it on. Sets work at the same time
without waiting for each other; every set has names of its own. Adding and removing is collective
over all ranks of the world, members or not, from one thread. Source of behaviour: Horovod 0.28.1,
horovod.common.process_sets.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from perseus import basics, config, control

_log = logging.getLogger(__name__)


class ProcessSet:
    """A set of ranks.

    ranks_or_comm: the global ranks, in any order. Communicators of mpi4py are not supported.

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
        self._whole = self.ranks  # with those that the present world lacks

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

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        # A copy of the global set would keep the ranks of the world that pickled it.
        if self is global_process_set:
            return "global_process_set"
        return super().__reduce_ex__(protocol)

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


def checked(process_set: Any) -> ProcessSet:
    """The set itself; TypeError for its number, its ranks and other things given for it."""
    if isinstance(process_set, ProcessSet):
        return process_set
    raise TypeError(
        f"[process_sets] process_set={process_set!r}: expected a ProcessSet; keep what "
        f"hvd.add_process_set([0, 1]) returns, and pass that"
    )


def number_of(process_set: ProcessSet) -> int | None:
    """A set's number, as it is; None while it is not registered. TypeError as from checked()."""
    try:
        return process_set.process_set_id
    except AttributeError:
        checked(process_set)
        raise


def group_id(process_set: ProcessSet) -> int:
    """The number of a set; ValueError while it is not registered, and when it has gone."""
    number = number_of(process_set)
    if number is None:
        raise ValueError("Process set provided does not exist, or has not been registered.")
    if number != 0:
        process_set.size()  # looks for it
    return number


_registered: dict[int, ProcessSet] = {}
_of_hosts: list[ProcessSet] = []  # of all hosts; empty until somebody asks
_made_here: list[ProcessSet] = []  # those of them that no script has added
_of_hosts_lock = threading.Lock()
_given_to_init: list[ProcessSet] = []
_made_dynamic = False  # by init(process_sets="dynamic"), for every later world of the process, too


def _are_dynamic() -> bool:
    """Whether sets may be added and removed after init()."""
    return _made_dynamic or config.dynamic_process_sets()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set on every rank of the world; returns it, with its id.

    process_set: a ProcessSet, or the global ranks of one. All ranks must call this with the same
    ranks; it returns when all have. Ids of removed sets are used again, the oldest first.

    Raises ValueError unless process sets are dynamic (HOROVOD_DYNAMIC_PROCESS_SETS=1 or
    init(process_sets="dynamic")), for ranks that do not exist or come twice, and for a set that is
    there already ("duplicate"); MismatchError on every rank where the ranks differ.
    """
    if not _are_dynamic():
        raise ValueError(
            "Dynamic process sets are disabled: Set HOROVOD_DYNAMIC_PROCESS_SETS=1, or call "
            'init(process_sets="dynamic").'
        )
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set on every rank of the world; its pending operations fail.

    True when it was removed: it has no id any more, and may be added again. False for the global
    set and for one that is not registered. ValueError unless process sets are dynamic.
    """
    if not _are_dynamic():
        raise ValueError(
            "Dynamic process sets are disabled: Set HOROVOD_DYNAMIC_PROCESS_SETS=1, or call "
            'init(process_sets="dynamic").'
        )
    group = number_of(process_set)
    if group is None or group == 0:
        return False
    control.remove_group(group)
    _registered.pop(group).process_set_id = None
    return True


def register(process_set: ProcessSet) -> None:
    """Give a set its id, whether or not process sets are dynamic. Collective."""
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    _check_ranks(ranks)
    try:
        group = control.add_group(ranks)
    except ValueError:  # on all ranks, which have compared theirs
        taken_over = _taken_over(process_set)
        if taken_over is None:
            raise
        group = taken_over
    process_set.process_set_id = group
    _registered[group] = process_set


def of_host() -> ProcessSet:
    """The set of the ranks of this host. The first call in a world is collective over all of it.

    Safe from several threads, of which no other may make sets at that moment.
    """
    if basics.local_size() == basics.size():
        return global_process_set
    with _of_hosts_lock:
        # A script may have removed one, which all ranks know.
        if not _of_hosts or any(entry.process_set_id is None for entry in _of_hosts):
            _of_hosts[:] = _make_of_hosts()
        return next(entry for entry in _of_hosts if basics.rank() in (entry.ranks or []))


def _taken_over(process_set: ProcessSet) -> int | None:
    """Let a set of a script replace the equal set of a host; return its id, or None."""
    with _of_hosts_lock:
        for found in _made_here:
            if found.ranks == process_set.ranks:
                _made_here.remove(found)
                _of_hosts[_of_hosts.index(found)] = process_set
                return found.process_set_id
    return None


def _make_of_hosts() -> list[ProcessSet]:
    """Register the sets of hosts that are missing; return all."""
    own = (basics.local_rank(), basics.local_size(), basics.cross_rank())
    lines = control.gather_lines(json.dumps(own), "process_sets.hosts")
    hosts = ranks_by_host([tuple(json.loads(line)) for line in lines])
    known = {tuple(entry.ranks or []): entry for entry in _registered.values()}
    of_hosts = []
    for ranks in hosts:
        found = known.get(tuple(ranks))
        if found is None:
            found = ProcessSet(ranks)
            register(found)
            _made_here.append(found)
        of_hosts.append(found)
    return of_hosts


def ranks_by_host(places: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """The ranks of each host; places: (local rank, local size, cross rank) of every rank.

    A cross rank counts only the hosts that own the same local rank.
    """
    sizes = {cross: size for local, size, cross in places if local == 0}
    hosts: list[list[int]] = [[] for _ in sizes]
    for rank, (local, _, cross) in enumerate(places):
        owners = [host for host in sorted(sizes) if sizes[host] > local]
        hosts[owners[cross]].append(rank)
    return hosts


def register_at_init(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """What init(process_sets=…) says. Collective; ValueError on every rank unless all agree.

    A world of an elastic job may lack ranks of a set, which then has the others. Sets without any
    rank, and those that are equal to an earlier one then, do not exist in that world.
    """
    global _made_dynamic
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'[init] process_sets={process_sets!r}: expected a list or "dynamic"')
        _made_dynamic = True
        process_sets = []
    given = [_as_set(entry) for entry in process_sets or []]
    wanted = given if basics.membership() is None else _present(given)
    if basics.size() > 1:
        _compare([entry.ranks or [] for entry in wanted])
    seen = [list(range(basics.size()))]
    for entry in wanted:
        if entry.ranks in seen:
            raise ValueError(f"[init] process set {entry.ranks} is a duplicate")
        seen.append(entry.ranks or [])
    for entry in wanted:
        register(entry)
    _given_to_init[:] = given


def _present(given: Sequence[ProcessSet]) -> list[ProcessSet]:
    """Leave the ranks that this world does not have out of sets; return the sets that exist."""
    seen, present = [list(range(basics.size()))], []
    for entry in given:
        entry.ranks = [rank for rank in entry._whole if rank < basics.size()]
        if entry.ranks and entry.ranks not in seen:
            seen.append(entry.ranks)
            present.append(entry)
        elif basics.rank() == 0:
            reason = "is equal to another set" if entry.ranks else "has no rank"
            _log.warning("[process_sets] the set %s %s in this world", entry._whole, reason)
    return present


def static_sets() -> list[ProcessSet]:
    """What the next world of elastic training begins with.

    The sets that init() was given, since nothing else could add them: add_process_set refuses. None
    where it does not; scripts written for Horovod, which drops all, then add them again.
    """
    return [] if _are_dynamic() else list(_given_to_init)


def ids_and_ranks() -> dict[int, list[int]]:
    """Every registered set's global ranks by its id, the global set included."""
    sets = {0: global_process_set, **_registered}
    return {group: list(entry.ranks or []) for group, entry in sorted(sets.items())}


def _as_set(entry: Any) -> ProcessSet:
    if isinstance(entry, ProcessSet):
        return entry
    raise ValueError(f"[init] process_sets: expected ProcessSet objects, got {entry!r}")


def _check_ranks(ranks: list[int]) -> None:
    size = basics.size()
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"[process_sets] {ranks}: expected one or more different ranks of 0 … {size - 1}"
        )


def _compare(sets: list[list[int]]) -> None:
    everybody = control.gather_lines(json.dumps(sets), "process_sets")
    for rank, line in enumerate(everybody):
        if line != everybody[0]:
            raise ValueError(
                f"[init] process sets differ: rank 0 has {everybody[0]}, rank {rank} has {line}"
            )


def _begin() -> None:
    # Sets end with their world; their objects can be registered in the next.
    for process_set in _registered.values():
        process_set.process_set_id = None
    _registered.clear()
    _of_hosts.clear()
    _made_here.clear()
    global_process_set.ranks = list(range(basics.size()))


basics.at_init(_begin)
