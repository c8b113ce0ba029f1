"""Futures whose callbacks run on one thread, in the order in which their operations were submitted.

That order is the same on every rank, so a callback may start collectives, as torch's PowerSGD hook
does. torch's own futures run a callback on the thread that adds it where they are complete already,
and else on one of several: ranks then start collectives in different orders.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_REST_SECONDS = 2.0


class Future(torch.futures.Future[Any]):
    """A future that the completer's thread completes. Any thread may use it."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: the GPU where its tensors lie, whose streams then keep the order; None = none."""
        super().__init__(devices=None if device is None else [device])
        self._device = device
        self._lock = threading.Lock()
        self._ends = False

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Return the future of callback(self), which runs once this future is complete."""
        result = Future(self._device)

        def run(_: Any) -> None:
            try:
                value = callback(self)
            except Exception as error:
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
        if completer.is_this_thread():
            super().add_done_callback(callback)
            return
        # It is complete by then, so torch runs the callback, and on a GPU orders its stream.
        completer.call(partial(super().add_done_callback, callback))

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Set the value, or the error, and run the callbacks. Called by the completer's thread."""
        with self._lock:
            self._ends = True
        if self._device is not None:
            error = error or _failure_of(self._device)
            if error is not None and not _can_be_pickled(error):
                error = RuntimeError(f"{type(error).__name__}: {error}")
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


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


class _Completer:
    """The thread that completes futures. It starts with the first of them."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ident = 0  # of the thread; 0 = it has not begun
        self._lock = threading.Lock()

    def begin_in_child(self) -> None:
        """Forget the thread and the jobs of the process that this one is a fork of."""
        atexit.unregister(self._rest)
        self._begin()

    def is_this_thread(self) -> bool:
        """Whether a callback of a future is calling."""
        return self._ident == threading.get_ident()

    def call(self, job: Callable[[], None]) -> None:
        """Run `job` on the completer's thread, after those that came before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="perseus futures", daemon=True
                )
                self._thread.start()
                atexit.register(self._rest)
        self._jobs.put(job)

    def _rest(self) -> None:
        """Wait until the thread is idle, unless a job waits for other ranks.

        If it is in torch's code when the interpreter ends, Python ends the thread there, which C++
        answers by aborting the process.
        """
        idle = threading.Event()
        self._jobs.put(idle.set)
        idle.wait(_REST_SECONDS)

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while True:
            try:
                self._jobs.get()()
            except Exception:  # other jobs must still run
                traceback.print_exc()


completer = _Completer()
os.register_at_fork(after_in_child=completer.begin_in_child)
