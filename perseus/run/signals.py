"""The signals that end or stop a job, for as long as it runs: Ctrl-C, SIGTERM, SIGHUP and Ctrl-Z.

Main thread only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Handler = Callable[[int, FrameType | None], None]


def catch(on_end: Handler, on_stop: Handler, waker: int) -> Callable[[], None]:
    """Have `on_end` and `on_stop` called; returns what puts back everything that was there.

    waker: a pipe's end that gets a byte then. In other threads than the main one, whose they are,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    old_waker = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    old = {}
    for number in (*_ENDING, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            old[number] = signal.signal(number, on_end if number in _ENDING else on_stop)

    def restore() -> None:
        for number, before in old.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(old_waker)

    return restore


def stop(number: int) -> None:
    """Do what the signal would have done; returns when this process is continued."""
    handler = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, handler)
