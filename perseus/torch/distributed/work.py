"""Collectives under way: what torch.distributed returns with async_op=True, or waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from perseus.errors import NanGradientError
from perseus.torch.distributed.completer import Completer, calling
from perseus.torch.distributed.future import Future
from perseus.torch.distributed.pending import InPlace, Piece
from perseus.torch.distributed.streams import Mark, aside, gpu_of
from perseus.torch.distributed.world import World
from perseus.torch.session import keep

NO_LIMIT = timedelta(0)


class _Latest(threading.local):
    """The work that this thread has made last, while a call of direct.py asks for it."""

    asked = False
    work: Work | None = None


latest = _Latest()


class _Composing(threading.local):
    """How many works this thread is composing of others, within one another."""

    depth = 0


_composing = _Composing()


@contextmanager
def composing() -> Iterator[None]:
    """Within it, barriers do not wait for new works: not before published(), when all is there."""
    _composing.depth += 1
    try:
        yield
    finally:
        _composing.depth -= 1


class Work(dist.Work):
    """One collective that has been submitted. Any thread may use it."""

    # Of most works these stay as they are.
    _limit: timedelta | None = None
    _mark: Mark | None = None
    _error: BaseException | None = None
    _future: Future | None = None

    def __init__(
        self,
        world: World,
        pieces: list[Piece],
        device: torch.device | None = None,
        in_order: bool = True,
    ) -> None:
        """pieces: the operations that this work consists of; it fails with the first that does.

        device: the GPU where the tensors lie, or None. in_order: whether all ranks have it in one
        order, as collectives; else it may end after operations that were submitted later.
        """
        super().__init__()
        self._world = world
        self._pieces = pieces
        self._device = device
        self._in_order = self._counts = in_order
        self._lock = threading.Lock()  # held until the operation ends
        self._result: list[torch.Tensor] = []
        self._future_lock = threading.Lock()
        if in_order and pieces and not _composing.depth:
            world.pending.begun(self)
        if latest.asked:  # or else its tensors would stay until the thread makes another
            latest.work = self

    def published(self) -> Work:
        """Let barriers wait for it, if it is part of no other. Returns this work."""
        if self._counts and self._pieces and not _composing.depth:
            self._world.pending.begun(self)
        return self

    def uncounted(self) -> Work:
        """Let no barrier wait for it, since it is one itself. Returns this work."""
        self._counts = False
        return self

    @staticmethod
    def failed(world: World, error: Exception) -> Work:
        """A work whose operation has ended with this error."""
        work = Work(world, [])
        work._error = as_torch_raises(error)
        return work

    def limited(self, timeout: timedelta) -> Work:
        """Limit each wait() without a timeout of its own. Returns this work."""
        self._limit = timeout
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the operation is done; on a GPU, the current stream waits for its tensors.

        timeout: None or zero for no other limit than those of the call and of the group.

        Raises the error of the operation; torch.distributed.DistBackendError if it is not done in
        time, after which one may wait again.
        """
        limit = timeout if timeout is not None and timeout > NO_LIMIT else self._limit
        if limit is not None:
            self._await_end(limit.total_seconds())
        self._settle_here()
        if self._error is not None:
            raise self._error
        return True

    def _await_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for handle, _ in self._pieces:
            if not self._world.operations.wait(handle, deadline - time.monotonic()):
                raise dist.DistBackendError(
                    f"[torch] an operation did not end within {seconds:g} s (timeout=): some "
                    f"rank has not started it, or is still busy with it"
                )

    def synchronize(self) -> None:
        """wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether wait() would return at once. Its tensors can then be used as after wait()."""
        if not all(_is_done(self._world, handle) for handle, _ in self._pieces):
            return False
        self._settle_here()
        return True

    def is_success(self) -> bool:
        """Whether the operation is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an operation that is done; None without one."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation has written. Waits for it."""
        self.wait()
        return self._result

    def get_future(self) -> Future:
        """Return a future of result(). Does not block, unless a callback of a future calls it."""
        with self._future_lock:
            if self._future is not None:
                return self._future
            completer = self._world.completer if self._in_order else Completer(stays=False)
            future = Future(completer, self._device)
            if calling() is None:
                completer.call(partial(self._complete_future, future))
            self._future = future
        if calling() is not None:
            # The thread that would complete it may be this one, or wait for it: the callback waits
            # for what it starts.
            self._complete_future(future)
        return future

    def take_pieces(self) -> list[Piece]:
        """The operations that are not known to be done, for a work that takes this one's place."""
        taken, self._pieces = self._pieces, []
        return taken

    def copying_back(self, copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Work:
        """Write `tensors` once their copies are written, which this work's one operation does.

        Returns this work, which nobody else has seen yet. Its result has the tensors, too.
        """
        instead = {id(copy): tensor for copy, tensor in zip(copies, tensors, strict=True)}

        def write(result: list[torch.Tensor]) -> list[torch.Tensor]:
            _copy_back(copies, tensors)
            return [instead.get(id(each), each) for each in result]

        return self.ending_with(write)

    def ending_with(self, write: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Work:
        """Make another result of that of this work's one operation, once it is done.

        Returns this work, which nobody else has seen yet.
        """
        if self._pieces:
            ((handle, finish),) = self._pieces
            self._pieces = [(handle, lambda output: write(finish(output)))]
        elif self._error is None:
            self._result = write(self._result)
        return self

    def __del__(self) -> None:
        """Let the world end operations for which nobody waits, and release their tensors."""
        pieces: list[Piece] = getattr(self, "_pieces", [])
        if pieces:
            self._world.pending.settled(self)
            self._world.pending.abandon(pieces, self._counts)

    def settle(self) -> None:
        """wait(), which leaves the error to others."""
        self._settle_here()

    @property
    def device(self) -> torch.device | None:
        """The GPU where the tensors lie, or None."""
        return self._device

    def _complete_future(self, future: Future) -> None:
        with aside(self._device):
            self._settle_here()
            future.complete(self._result, self._error)

    def _settle_here(self) -> None:
        self._settle()
        if self._mark is not None:
            self._mark.join(self._result)

    def _settle(self) -> None:
        if not self._pieces:
            return
        with self._lock:
            while self._pieces:
                handle, finish = self._pieces[0]
                try:
                    self._result += finish(self._world.operations.synchronize(handle))
                except Exception as error:
                    self._error = self._error or as_torch_raises(error)
                left = self._pieces[1:]
                if self._device is not None and not left:
                    try:
                        self._mark = Mark(self._device)
                    except Exception as error:
                        self._error = self._error or as_torch_raises(error)
                if not left:
                    self._world.pending.settled(self)
                self._pieces = left  # what others look at without the lock: the last thing


class Done(Work):
    """A work that has been awaited."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


class _Received(InPlace):
    """What has been received, and from whom. It does not refer to the work, which nobody may."""

    source = -1

    def __call__(self, source: int) -> list[torch.Tensor]:
        self.source = source
        return self.tensors


class Receive(Work):
    """A receive, which knows its sender once it is done."""

    def __init__(self, world: World, handle: int, tensors: list[torch.Tensor]) -> None:
        """handle: of `world.operations`. tensors: what is received, one."""
        self._received = _Received(tensors)
        super().__init__(world, [(handle, self._received)], gpu_of(tensors), in_order=False)

    def source_rank(self) -> int:
        """Return the sender's number in the group. Waits for it."""
        self.wait()
        return self._received.source

    # c10d has asked for it under both names.
    _source_rank = source_rank


def joined(world: World, start: Callable[[], list[Work]]) -> Work:
    """One work for several.

    start: returns works that nobody waits for yet.
    """
    with composing():
        works = start()
        device = next((work.device for work in works if work.device is not None), None)
        work = Work(world, [piece for work in works for piece in work.take_pieces()], device)
        work._error = next((work._error for work in works if work._error is not None), None)
    return work.published()


def _copy_back(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():  # where all tensors can be written, also its own
        for copy, tensor in zip(copies, tensors, strict=True):
            if copy.data_ptr() != tensor.data_ptr():
                tensor.copy_(copy)
                # Their memory belongs to the stream on which the operation began.
                keep(copy)
                keep(tensor)


def _is_done(world: World, handle: int) -> bool:
    try:
        return world.operations.poll(handle)
    except ValueError:  # another thread has just settled it
        return True


def as_torch_raises(error: Exception) -> Exception:
    """The error under the class that scripts for torch.distributed catch.

    A NaN that is to be an error is none of the group, which goes on: it keeps its own class.
    """
    if isinstance(error, (dist.DistError, NanGradientError)):
        return error
    made = dist.DistBackendError(str(error))
    made.__cause__ = error
    return made
