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
    first_local_rank: in the first world that it was in, by which it may have chosen a GPU; None for
        one that was in none.
    """

    number: int
    host: str
    slot: int
    rank: int | None
    commits: int = 0
    first_local_rank: int | None = None


def ranked(candidates: Sequence[Candidate]) -> list[tuple[Candidate, Slot]]:
    """Give every candidate its place in the next world, ordered by rank.

    Ranks of a host are consecutive. Those that have the training's state come first: hosts with
    survivors before new hosts, and survivors of a host before its new ranks, those with most
    commits first and then in the order of the last world. So rank 0 is a survivor if there is any,
    and none has more of the training.
    """
    ordered = sorted(candidates, key=_age)
    hosts = list(dict.fromkeys(candidate.host for candidate in ordered))
    members = {host: [each for each in ordered if each.host == host] for host in hosts}
    local_ranks: dict[int, int] = {}
    for those in members.values():
        local_ranks |= _local_ranks(those)
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


def _local_ranks(members: Sequence[Candidate]) -> dict[int, int]:
    """Return the local ranks of the candidates of a host, by their numbers.

    Scripts choose a GPU by the first one that they get, and keep it. So a new candidate gets one
    that no other has begun with, and a survivor its first one again unless it is too high now.
    Otherwise they follow the slots.
    """
    ordered = sorted(members, key=lambda each: each.slot)
    firsts = {each.number: each.first_local_rank for each in ordered}
    free = [number for number in range(len(ordered)) if number not in firsts.values()]
    found = dict(zip((n for n, first in firsts.items() if first is None), free, strict=False))
    for number, first in firsts.items():
        if first is not None and first < len(ordered) and first not in found.values():
            found[number] = first
    left = (number for number in range(len(ordered)) if number not in found.values())
    return found | {number: next(left) for number in firsts if number not in found}


def _age(candidate: Candidate) -> tuple[bool, int, int]:
    """Order survivors by commits and rank, then the others by number."""
    if candidate.rank is None:
        return True, 0, candidate.number
    return False, -candidate.commits, candidate.rank
