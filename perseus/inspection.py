"""Shows where Python's threads are when a signal asks this process what it waits for. Stateless."""

from __future__ import annotations

import faulthandler
import signal

_STANDARD_ERROR = 2


def show_threads() -> None:
    """Let the signal that the core answers print the stacks of all threads, too.

    It works while a thread holds the interpreter's lock. A handler of the script stays.
    """
    from perseus import _core

    number = _core.inspection_signal()
    # The core's handler is none that Python knows of.
    if number and signal.getsignal(number) is signal.SIG_DFL:
        # Not chain=True, with which the signal would end system calls with EINTR.
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=True)
        _core.inspection_signal(chain=True)
