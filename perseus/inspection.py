"""Shows where Python's threads are when a signal asks this process what it waits for. Stateless."""

from __future__ import annotations

import faulthandler
import signal

_STANDARD_ERROR = 2


def show_threads(number: int) -> None:
    """Let the signal print the stacks of all threads, before the core answers it, too.

    It works while a thread holds the interpreter's lock. number: of the signal that the core
    answers; 0 = none.
    """
    # A script may have taken the signal since.
    if number and signal.getsignal(number) is signal.SIG_DFL:
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=True, chain=True)
