"""Functions in threads of their own: `horovod.runner.util.threads`, which Horovod's tests use."""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start target(*args) in a thread and return the thread.

    daemon: do not keep the process alive for it. silent: swallow its exceptions.
    Raises ValueError if args is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; write (arg,) for a single one")

    def silently(*given: Any) -> None:
        with suppress(Exception):
            target(*given)

    thread = threading.Thread(
        target=silently if silent else target, args=args, name=name, daemon=daemon
    )
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Run func(*args) in a thread of its own once `event` is set, unless `stop` is set first.

    stop is looked at every check_stop_interval_s seconds; it must be given when daemon is False.
    ValueError for arguments that do not fit.
    """
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; write (arg,) for a single one")
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        if stop is None:
            event.wait()
        else:
            while not stop.is_set() and not event.wait(check_stop_interval_s):
                pass
            if stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)
