"""Numbers the ranks of a world of an elastic job. Pure functions, thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.run.hosts import Slot


@dataclass(frozen=True)
class Candidate:
    """A process that is to be a rank of the next world.

    rank: in the last world; None for one that was not in it.
    commits: so many have gone into the training's state that it has.
    """

    number: int
    host: str
    slot: int
    rank: int | None
    commits: int = 0


def ranked(candidates: Sequence[Candidate]) -> list[tuple[Candidate, Slot]]:
    """Give every candidate its place in the next world, ordered by rank.

    Ranks of a host are consecutive. Those that have the training's state come first: hosts with
    survivors before new hosts, and survivors of a host before its new ranks, those with most
    commits first and then in the order of the last world. So rank 0 is a survivor if there is any,
    and none has more of the training. The local rank follows the slots of a
    host, because scripts choose a GPU by it.
    """
    ordered = sorted(candidates, key=_age)
    hosts = list(dict.fromkeys(candidate.host for candidate in ordered))
    members = {host: [each for each in ordered if each.host == host] for host in hosts}
    local_ranks = {
        each.number: index
        for those in members.values()
        for index, each in enumerate(sorted(those, key=lambda each: each.slot))
    }
    result: list[tuple[Candidate, Slot]] = []
    for host in hosts:
        for each in members[host]:
            local_rank = local_ranks[each.number]
            owners = [other for other in hosts if len(members[other]) > local_rank]
            slot = Slot(
                len(result),
                host,
                local_rank,
                len(members[host]),
                owners.index(host),
                len(owners),
            )
            result.append((each, slot))
    return result


def _age(candidate: Candidate) -> tuple[bool, int, int]:
    """Order survivors by commits and rank, then the others by number."""
    if candidate.rank is None:
        return True, 0, candidate.number
    return False, -candidate.commits, candidate.rank
