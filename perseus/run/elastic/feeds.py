"""Which survivors of an elastic job feed which new ranks while they wait for the next world.

A feed takes time that training may go on, so the news of new ranks says that one is under way, and
ranks that commit often wait for its end. Single-threaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import inf

from perseus.run.bootstrap.words import Fed, Feed, FromLauncher
from perseus.run.elastic.process import Process

_MOST_SECONDS = 600.0  # that feeds may hold up new ranks
_GATHER_SECONDS = 1.0  # that the first ranks of a host wait for the others to ask for a world, too


class Feeds:
    """The feeds of one job. tell: sends a message to a process."""

    def __init__(self, tell: Callable[[Process, FromLauncher], None]) -> None:
        self._tell = tell
        self._survivors: dict[int, Process] = {}  # of feeds that are under way
        self._begun = 0
        self._since = inf  # when the first new rank asked for the next world
        self._gathers = False

    def begin(
        self, members: list[Process], new: Iterable[Process], loading: list[Process], now: float
    ) -> None:
        """Have members feed those that are new and have not been fed, each host's together.

        loading: those that will ask for a world, too. Members of the same host come first, since
        they need no network, and then those that feed nobody yet.
        """
        by_host: dict[int, list[Process]] = {}
        for process in new:
            self._since = min(self._since, now)
            if process.feed is None:
                by_host.setdefault(id(process.host), []).append(process)
        self._gathers = False
        for hungry in by_host.values():
            host = hungry[0].host
            if not members:
                continue
            if now < self._since + _GATHER_SECONDS and any(each.host is host for each in loading):
                self._gathers = True
                continue
            self._begun += 1
            busy = Counter(id(each) for each in self._survivors.values())
            survivor = min(
                members, key=lambda each: (each.host.name != host.name, busy[id(each)], each.rank)
            )
            self._survivors[self._begun] = survivor
            for rank, process in enumerate([survivor, *hungry]):
                if rank > 0:
                    process.feed = self._begun
                self._tell(process, Feed(self._begun, rank, len(hungry) + 1))

    def on_fed(self, process: Process, word: Fed) -> None:
        """A process has done its part."""
        if word.number == process.feed:
            process.fed = word.blocks > 0
        if self._survivors.get(word.number) is process:
            del self._survivors[word.number]

    def forget(self) -> None:
        """A new world begins, without those that are not done."""
        self._survivors.clear()
        self._since, self._gathers = inf, False

    def are_under_way(self, alive: Iterable[Process], now: float) -> bool:
        """Return whether one is, between processes that live, or soon will be."""
        living = {id(process): process for process in alive}
        fed = {process.feed for process in living.values()}
        for number, survivor in list(self._survivors.items()):
            if id(survivor) not in living or number not in fed:
                del self._survivors[number]
        return (self._gathers or bool(self._survivors)) and now < self._since + _MOST_SECONDS
