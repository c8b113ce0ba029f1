"""Which slots of hosts an elastic job may use: those that are discovered and have not failed.

A slot is a place for one rank on a host: (host, index). Single-threaded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from perseus.run.hosts import Host

Place = tuple[str, int]
_DOUBLINGS = 12  # more than there are between a second and an hour


class UsableSlots:
    """The discovered hosts, in the order in which they were first seen, without failed slots.

    cooldown: the shortest and the longest time, in seconds, after which a slot that has failed may
        be used again. The time doubles with each failure. None = never again.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._slots: dict[str, list[int]] = {}  # of all hosts that have been seen
        self._present: dict[str, int] = {}
        self._failures: dict[Place, int] = {}
        self._barred_until: dict[Place, float] = {}

    def discover(self, hosts: Iterable[Host]) -> bool:
        """Take the hosts that exist now; returns whether something has changed."""
        before = self._present
        self._present = {host.name: host.slots for host in hosts if host.slots > 0}
        for name, count in self._present.items():
            self._slots[name] = self._resized(name, count)
        return self._present != before

    def _resized(self, name: str, count: int) -> list[int]:
        """Return the slots of a host that has `count` of them now.

        Those that have failed go first, since their failure may be the reason; then the last ones.
        """
        slots = self._slots.get(name, [])
        free = (index for index in range(len(slots) + count) if index not in slots)
        slots = slots + [next(free) for _ in range(count - len(slots))]
        slots.sort(key=lambda index: (self._barred_until.get((name, index), 0.0), index))
        return sorted(slots[:count])

    def bar(self, place: Place, now: float) -> float | None:
        """Do not use a slot for a while, because its rank has failed.

        now: in time.monotonic() seconds. Returns for how many seconds; None = for ever.
        """
        count = self._failures[place] = self._failures.get(place, 0) + 1
        if self._cooldown is None:
            self._barred_until[place] = float("inf")
            return None
        shortest, longest = self._cooldown
        # Hosts that failed together should not come back together.
        wait = shortest * 2.0 ** min(count - 1, _DOUBLINGS) + random.uniform(0.0, 1.0)
        wait = min(max(wait, shortest), longest)
        self._barred_until[place] = now + wait
        return wait

    def has_failed(self, place: Place) -> bool:
        """Return whether a rank has ever failed in this slot."""
        return place in self._failures

    def usable(self, now: float) -> list[Place]:
        """Return the slots that may be used, host by host."""
        return [
            (name, index)
            for name, slots in self._slots.items()
            if name in self._present
            for index in slots
            if self._barred_until.get((name, index), now) <= now
        ]

    def hosts(self) -> int:
        """Return how many hosts are there now, whether their slots may be used or not."""
        return len(self._present)

    def slots_of(self, host: str) -> int:
        """Return how many slots a host has, barred ones included; 0 for an unknown host."""
        return self._present.get(host, 0)

    def next_return(self, now: float) -> float | None:
        """Return when the next barred slot of a present host may be used again; None = never."""
        times = [
            until
            for (name, index), until in self._barred_until.items()
            if now < until < float("inf")
            if name in self._present and index in self._slots[name]
        ]
        return min(times, default=None)
