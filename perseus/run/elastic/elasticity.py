"""What an elastic job is allowed to become. Immutable, thread-safe."""

from __future__ import annotations

from dataclasses import dataclass

from perseus.run.elastic.discovery import HostDiscovery


@dataclass(frozen=True)
class Elasticity:
    """How many ranks an elastic job has, where they come from, and when it gives up.

    start: the ranks to start with. least, most: the ranks of any world; most = None: all slots.
    timeout: seconds to wait for `start` or `least` ranks. reset_limit: the number of worlds after
    the first; None = any. cooldown: see UsableSlots.
    """

    discovery: HostDiscovery
    start: int
    least: int
    most: int | None = None
    timeout: float = 600.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
