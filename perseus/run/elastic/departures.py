"""Processes that are to leave an elastic job, and which ones keep worlds from beginning.

Single-threaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import inf

from perseus.run.bootstrap.words import FromLauncher, Leave
from perseus.run.elastic.process import Process

FAILED_STARTS = 3  # after which a process goes whose own errors have ended them


class Departures:
    """Lets processes go, and ends those that stay.

    tell: sends a message to a process. grace: how long one may take to leave, in seconds.
    """

    def __init__(self, tell: Callable[[Process, FromLauncher], None], grace: float) -> None:
        self._tell = tell
        self._grace = grace

    def dismiss(self, process: Process, why: str) -> None:
        """Let a process leave that waits for a world."""
        process.dismissed, process.request = True, None
        process.end_at = time.monotonic() + self._grace
        self._tell(process, Leave(why))

    def let_go(self, process: Process, why: str, now: float) -> None:
        """Dismiss a process if it waits for a world, and end it otherwise."""
        if process.request is not None:
            self.dismiss(process, why)
        else:
            process.dismissed, process.end_at = True, now

    def end_overdue(self, processes: Iterable[Process], now: float) -> None:
        """End processes that were told to leave, and have not done so."""
        for process in processes:
            if now >= process.end_at:
                process.end_at = inf
                process.host.send(b"END %d\n" % process.number)


def at_fault(members: list[Process]) -> list[Process]:
    """Return those that have kept too many worlds from beginning while nobody died.

    members: the processes of the world that has not begun, all of which live. Counts its failure.
    """
    # Others have had a world before new ones came, with which they cannot connect for example.
    trained = not all(each.is_new for each in members)
    for each in members:
        own_fault = each.request is not None and each.request.fault
        each.failed_starts += own_fault or (each.is_new and trained)
    found = [each for each in members if each.failed_starts >= FAILED_STARTS]
    return [each for each in found if each.is_new] or found
