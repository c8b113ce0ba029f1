"""Host lists and rank places in Horovod's form: `horovod.runner.common.util.hosts`.

Parsing and placing are perseusrun's own, which takes more: hosts without slots, comments and blank
lines in host files. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.run import hosts as own


class HostInfo:
    """A host and how many ranks it takes."""

    def __init__(self, hostname: str, slots: int) -> None:
        self.hostname = hostname
        self.slots = slots

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """'a:2' -> a with 2 slots; 'a' -> a with 1. ValueError for any other text."""
        found = parse_hosts(host_string)
        if len(found) != 1:
            raise ValueError(f"Invalid host input '{host_string}': expected one host such as a:2")
        return found[0]


@dataclass
class SlotInfo:
    """One rank's place."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """The numbers with commas: rank, size, local rank and size, cross rank and size."""
        numbers = (
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.cross_rank,
            self.cross_size,
        )
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """'a:2,b:4' -> both hosts. ValueError ("Invalid host input") names what it does not get."""
    return [HostInfo(host.name, host.slots) for host in own.parse_hosts(hosts_string)]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """The same as (names in order, slots by name)."""
    parsed = own.parse_hosts(hosts)
    return [host.name for host in parsed], {host.name: host.slots for host in parsed}


def parse_host_files(filename: str) -> str:
    """A host file's lines, e.g. `a slots=2`, as 'a:2,b:4'. ValueError names file and line."""
    return ",".join(f"{host.name}:{host.slots}" for host in own.parse_hostfile(filename))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Places for as many ranks as there are slots, at most max_num_proc, host after host.

    ValueError when that is less than min_num_proc.
    """
    available = sum(host.slots for host in hosts)
    size = available if max_num_proc is None else min(available, max_num_proc)
    if size < min_num_proc:
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({size})"
        )
    return [
        SlotInfo(
            hostname=slot.host,
            rank=slot.rank,
            local_rank=slot.local_rank,
            cross_rank=slot.cross_rank,
            size=size,
            local_size=slot.local_size,
            cross_size=slot.cross_size,
        )
        for slot in own.place([own.Host(host.hostname, host.slots) for host in hosts], size)
    ]
