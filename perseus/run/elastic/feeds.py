"""Which survivors of an elastic job feed which new ranks while they wait for the next world.

A feed takes time that training may go on, so the news of new ranks says that one is under way, and
ranks that commit often wait for its end. Single-threaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from perseus.run.bootstrap.words import Fed, Feed, FromLauncher
from perseus.run.elastic.process import Process

_MOST_SECONDS = 600.0  # that a feed may hold up new ranks


@dataclass
class _UnderWay:
    survivor: Process
    until: float


class Feeds:
    """The feeds of one job. tell: sends a message to a process."""

    def __init__(self, tell: Callable[[Process, FromLauncher], None]) -> None:
        self._tell = tell
        self._under_way: dict[int, _UnderWay] = {}
        self._begun = 0

    def begin(self, members: list[Process], new: Iterable[Process], now: float) -> None:
        """Have members feed those that are new and have not been fed, each host's together.

        They must have started together, and all have asked for a world. Members of the same host
        come first, since they need no network, and then the one with the lowest rank.
        """
        by_host: dict[int, list[Process]] = {}
        for process in new:
            if process.feed is None:
                by_host.setdefault(id(process.host), []).append(process)
        for hungry in by_host.values():
            host = hungry[0].host
            if len(hungry) < len(host.running) or not members:
                continue
            self._begun += 1
            survivor = min(members, key=lambda each: (each.host.name != host.name, each.rank))
            self._under_way[self._begun] = _UnderWay(survivor, now + _MOST_SECONDS)
            for rank, process in enumerate([survivor, *hungry]):
                if rank > 0:
                    process.feed = self._begun
                self._tell(process, Feed(self._begun, rank, len(hungry) + 1))

    def on_fed(self, process: Process, word: Fed) -> None:
        """A process has done its part."""
        if word.number == process.feed:
            process.fed = word.blocks > 0
        feed = self._under_way.get(word.number)
        if feed is not None and feed.survivor is process:
            del self._under_way[word.number]

    def are_under_way(self, alive: Iterable[Process], now: float) -> bool:
        """Return whether one is, between processes that live."""
        living = {id(process): process for process in alive}
        fed = {process.feed for process in living.values()}
        for number, feed in list(self._under_way.items()):
            if id(feed.survivor) not in living or number not in fed or now >= feed.until:
                del self._under_way[number]
        return bool(self._under_way)
