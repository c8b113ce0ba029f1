"""Handles signals while a job runs: Ctrl-C, SIGTERM, SIGHUP, Ctrl-Z, and the one that inspects it.

For the main thread, to which Python delivers signals, except forgets_children().
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from perseus.run import agent

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Handler = Callable[[int, FrameType | None], None]


def inspect_signal() -> int:
    """Return the number of the signal that asks what a process waits for; 0 = none.

    Raises ValueError for a wrong PERSEUS_INSPECT_SIGNAL.
    """
    text = os.environ.get("PERSEUS_INSPECT_SIGNAL") or "43"
    number = int(text) if text.isdecimal() else -1
    if number not in {0, signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.NSIG)}:
        raise ValueError(
            f"PERSEUS_INSPECT_SIGNAL={text}: expected 0, 10, 12, or {int(signal.SIGRTMIN)} to "
            f"{signal.NSIG - 1}, since others have a meaning"
        )
    return number


def forgets_children() -> bool:
    """Return whether this process ignores SIGCHLD, so that nobody learns how its children end.

    A process inherits that from the one that has started it. Thread-safe.
    """
    return signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN


def remember_children() -> None:
    """Have the kernel tell how the children of this process end. For the main thread only."""
    if forgets_children():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def catch(on_end: Handler, on_stop: Handler, on_inspect: Handler, waker: int) -> Callable[[], None]:
    """Install the handlers, and return a function that restores the earlier ones.

    waker: the write end of a non-blocking pipe, which gets a byte for every signal. Outside of the
    main thread the function does nothing: other threads cannot handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    inspection = inspect_signal()
    old_waker = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    old: dict[int, Any] = {}
    if forgets_children():
        old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (*_ENDING, signal.SIGTSTP):
        # nohup and shells ignore a signal for background jobs, which must remain so. A handler that
        # is not Python's (None) could not be restored.
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            old[number] = signal.signal(number, on_end if number in _ENDING else on_stop)
    if inspection and not agent.handles(os.getpid(), inspection):  # as the core does in a world
        old[inspection] = signal.signal(inspection, on_inspect)

    def restore() -> None:
        for number, before in old.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(old_waker)

    return restore


def stop(number: int) -> None:
    """Take the default action of the signal; return when this process is continued."""
    handler = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, handler)
