"""The signals that end a job, for as long as it runs: Ctrl-C, SIGTERM, SIGHUP. Main thread only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def catch(handler: Callable[[int, FrameType | None], None], waker: int) -> Callable[[], None]:
    """Have `handler` called for them; returns what puts back everything that was there.

    waker: a pipe's end that gets a byte then. In other threads than the main one, whose they are,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    old_waker = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    old = {}
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            old[number] = signal.signal(number, handler)

    def restore() -> None:
        for number, before in old.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(old_waker)

    return restore
