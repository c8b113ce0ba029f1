"""The threads that complete futures and run their callbacks.

Each process group has one, so that no group waits for another; each send and each receive has one
of its own, because they end in any order. Any thread may call everything here.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

_REST_SECONDS = 2.0
# Of all completers; a fork makes a new one, whoever holds this. The garbage collector may end a
# group while this thread holds it.
_lock = threading.RLock()
_running: set[Completer] = set()  # those that have a thread


class _Calling(threading.local):
    """Whose thread this is."""

    completer: Completer | None = None


_calling = _Calling()


def calling() -> Completer | None:
    """Return the completer whose thread is calling, in a callback of a future; else None."""
    return _calling.completer


class Completer:
    """Runs jobs on one thread, in their order. The thread starts with the first of them."""

    def __init__(self, stays: bool = True) -> None:
        """stays: whether the thread waits for more jobs, until end(); else it ends with the last.

        A job that comes later starts another thread, which does not stay.
        """
        self._stays = stays
        self._begin()

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, job: Callable[[], object]) -> None:
        """Run `job` on the thread, after those that came before.

        Raises RuntimeError, and never runs it, if no thread can be started.
        """
        with _lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="perseus futures", daemon=True)
                thread.start()
                self._thread = thread
            _running.add(self)
            self._jobs.put(job)

    def end(self) -> None:
        """Let the thread end once it has run the jobs that it has. Does not wait for that."""
        with _lock:
            self._stays = False
            self._wake(lambda: None)

    def _wake(self, job: Callable[[], object]) -> bool:
        """Give the thread a job, unless there is no thread. Called with the lock."""
        if self._thread is None:
            return False
        self._jobs.put(job)
        return True

    def _run(self) -> None:
        _calling.completer = self
        while True:
            try:
                job = self._jobs.get(block=self._stays)
            except queue.Empty:
                with _lock:
                    if not self._jobs.empty():
                        continue
                    self._thread = None
                    _running.discard(self)
                    return
            try:
                job()
            except BaseException:  # other jobs must still run
                traceback.print_exc()
            del job  # and what it holds, while the thread waits for the next one


def rest() -> None:
    """Wait until no thread has anything to do but to wait for other ranks.

    If one is in torch's code when the interpreter ends, Python ends the thread there, which C++
    answers by aborting the process.
    """
    idle = []
    with _lock:
        for completer in _running:
            event = threading.Event()
            if completer._wake(event.set):
                idle.append(event)
    deadline = time.monotonic() + _REST_SECONDS
    for event in idle:
        event.wait(max(0.0, deadline - time.monotonic()))


def _begin_in_child() -> None:
    """Forget the threads and the jobs of the process that this one is a fork of."""
    global _lock
    _lock = threading.RLock()
    for completer in _running:
        completer._begin()
    _running.clear()
    _calling.completer = None


os.register_at_fork(after_in_child=_begin_in_child)
