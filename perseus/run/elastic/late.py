"""Processes that are late: whether they live is asked, and some are killed. Single-threaded."""

from __future__ import annotations

from collections.abc import Callable

from perseus.run.bootstrap.words import FromLauncher, Ping
from perseus.run.elastic.process import Process

_ASK_SECONDS = 0.25
# How long a rank may do nothing while others wait for the next world. One that is stopped does not
# go on by itself, and mostly the world has ended because of it; others may wait for a disk.
_STOPPED_SECONDS, _DEAF_SECONDS = _ASK_SECONDS, 30.0
_WARN_SECONDS = 30.0
# Nobody waits for a process that loads, but its slot is lost as long as it is stopped.
_LOOK_SECONDS, _STOPPED_LOADING_SECONDS = 0.5, 2.0


class Loading:
    """Looks after processes that have not asked for a world yet.

    show: prints a line of the launcher's own.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.next_at = 0.0  # when to look again

    def look(self, loading: list[Process], now: float) -> None:
        """Kill those that are stopped, and do not go on by themselves."""
        if now < self.next_at:
            return
        self.next_at = now + _LOOK_SECONDS
        for process in loading:
            if not process.is_stopped:
                process.heard_at = now
            if now >= process.heard_at + _STOPPED_LOADING_SECONDS:
                self._show(
                    f"{process.name} is stopped (SIGSTOP) and has not asked for a world: it is "
                    f"killed"
                )
                process.kill()
            else:
                process.host.send(b"STATE %d\n" % process.number)


class Questions:
    """What ranks are asked for which others wait between two worlds, as long as there are any.

    tell: sends a message to a process. show: prints a line of the launcher's own.
    """

    def __init__(
        self,
        tell: Callable[[Process, FromLauncher], None],
        show: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._show = show
        self._asked_at = self._warn_at = 0.0
        self._known: set[int] = set()  # the numbers of those that were late when it last asked
        self.since = 0.0

    def next_at(self) -> float:
        """Return when to ask again."""
        return self._asked_at + _ASK_SECONDS

    def forget(self) -> None:
        """Begin anew: what has been asked and answered was about the last world."""
        self._asked_at = 0.0

    def are_due(self, late: list[Process], now: float) -> bool:
        """Return whether to ask now. What is known of a rank counts from when it became late.

        since: when the first of these questions was asked.
        """
        if not late or now < self.next_at():
            return False
        # Nobody has been late for a while, or perseusrun itself was stopped.
        if now > self._asked_at + 2 * _ASK_SECONDS:
            self._known.clear()
            self.since, self._warn_at = now, now + _WARN_SECONDS
        for process in late:
            if process.number not in self._known:
                process.heard_at, process.ticks, process.is_stopped = now, None, False
        self._known = {process.number for process in late}
        self._asked_at = now
        return True

    def ask(self, late: list[Process], others_wait: bool, now: float) -> None:
        """Ask late ranks whether they live, and kill those that do not; say for whom others wait.

        Ranks are late without others that wait if they do not meet at the beginning of a world.
        """
        if others_wait and now >= self._warn_at:
            names = ", ".join(process.name for process in late)
            self._show(f"the next world waits for {names}, which lives but is still at work")
            self._warn_at = now + _WARN_SECONDS
        for process in late:
            if process.is_killed:  # its host must still answer
                process.host.send(b"STATE %d\n" % process.number)
                continue
            patience = _STOPPED_SECONDS if process.is_stopped else _DEAF_SECONDS
            if now >= process.heard_at + patience:
                state = (
                    "is stopped (SIGSTOP)"
                    if process.is_stopped
                    else f"has not done anything for {patience:g} s"
                )
                self._show(
                    f"{process.name} {state} while others wait for the next world: it is killed"
                )
                process.kill()
            else:
                self._tell(process, Ping())
                process.host.send(b"STATE %d\n" % process.number)
