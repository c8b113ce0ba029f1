"""Futures whose callbacks run on the thread of their group, in the order of their operations.

That order is the same on every rank, so a callback may start collectives, as torch's PowerSGD hook
does. torch's own futures run a callback on the thread that adds it where they are complete already,
and else on one of several: ranks then start collectives in different orders.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from perseus.torch.distributed.completer import Completer, calling


class Future(torch.futures.Future[Any]):
    """A future that a completer's thread completes. Any thread may use it."""

    def __init__(self, completer: Completer, device: torch.device | None = None) -> None:
        """completer: runs callbacks that are added once it is complete.

        device: the GPU where its tensors lie, whose streams then keep the order; None = none.
        """
        super().__init__(devices=None if device is None else [device])
        self._completer = completer
        self._device = device
        self._lock = threading.Lock()
        self._ends = False

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Return the future of callback(self), which runs once this future is complete."""
        result = Future(self._completer, self._device)

        def run(_: Any) -> None:
            try:
                value = callback(self)
            except BaseException as error:  # sys.exit() included, or nothing would wake waiters
                result.complete(None, error)
            else:
                result.complete(value, None)

        self.add_done_callback(run)
        return result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Run callback(self) once this future is complete."""
        with self._lock:
            if not self._ends:
                super().add_done_callback(callback)
                return
        # torch runs the callback at once, which may add another: without the lock.
        if calling() is not None:
            super().add_done_callback(callback)
            return
        # It is complete by then, so torch runs the callback, and on a GPU orders its stream.
        self._completer.call(partial(super().add_done_callback, callback))

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Set the value, or the error, and run the callbacks. Called by a completer's thread.

        Whoever waits gets a RuntimeError instead of SystemExit and the like, as from torch.
        """
        with self._lock:
            self._ends = True
        if self._device is not None:
            error = error or _failure_of(self._device)
        if error is None:
            self.set_result(value)
        elif isinstance(error, Exception) and (self._device is None or _can_be_pickled(error)):
            self.set_exception(error)
        else:
            self.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _failure_of(device: torch.device) -> Exception | None:
    """Why this GPU records no event: torch's future would not wake who waits for it, then."""
    try:
        torch.cuda.current_stream(device).record_event()
    except Exception as error:
        return error
    return None


def _can_be_pickled(error: BaseException) -> bool:
    """Whether torch can look for tensors in it, as a future with a GPU does."""
    try:
        pickle.dumps(error)
    except Exception:
        return False
    return True
