"""Handles the signals that end or stop a job while it runs: Ctrl-C, SIGTERM, SIGHUP and Ctrl-Z.

For the main thread only, because Python delivers signals to it.
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
    """Install `on_end` and `on_stop`, and return a function that restores the earlier handlers.

    waker: the write end of a non-blocking pipe, which gets a byte for every signal. Outside of the
    main thread the function does nothing: other threads cannot handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    old_waker = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    old = {}
    for number in (*_ENDING, signal.SIGTSTP):
        # nohup and shells ignore a signal for background jobs, which must remain so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            old[number] = signal.signal(number, on_end if number in _ENDING else on_stop)

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
