"""A thread that runs exchanges of a hook in the order in which DDP hands over its buckets.

DDP hands them over in the same order on every rank, so collectives start in the same order, too.
Callbacks of gloo's futures do not: they run in another order on each rank.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

Job = Callable[[], torch.Tensor]


class Worker:
    """Runs jobs one after the other. Any thread may submit them.

    The thread starts with the first job and ends when the Worker is destroyed.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Job) -> torch.futures.Future[torch.Tensor]:
        """Return the future of job(), which fails with what the job raises."""
        if not self._started:
            # The thread must not keep the Worker alive, nor a process whose peers have failed.
            threading.Thread(
                target=_run, args=(self._jobs,), name="perseus ddp hook", daemon=True
            ).start()
            self._started = True
            weakref.finalize(self, self._jobs.put, None).atexit = False
        outcome: list[Callable[[], torch.Tensor]] = []

        def conclude(_: Any) -> torch.Tensor:
            return outcome[0]()

        begun: torch.futures.Future[None] = torch.futures.Future()
        # DDP reads futures in C++, which sees the errors of callbacks, but not set_exception().
        result = begun.then(conclude)

        def run() -> None:
            outcome.append(_outcome(job))
            begun.set_result(None)

        self._jobs.put(run)
        return result


def _outcome(job: Job) -> Callable[[], torch.Tensor]:
    """Run the job; return a function that returns its result or raises its error."""
    try:
        value = job()
    except Exception as error:
        failure = error  # `error` is deleted at the end of this block

        def fail() -> torch.Tensor:
            raise failure

        return fail
    return lambda: value


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.no_grad():
        while (run := jobs.get()) is not None:
            run()
            del run  # which holds a bucket
