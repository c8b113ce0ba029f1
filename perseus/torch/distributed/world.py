"""The world of one process group: its context in the core, which no other group shares.

Groups therefore fail, time out and end apart from each other, as torch's do. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from perseus import _core, basics
from perseus.errors import HorovodInternalError
from perseus.failures import Failures
from perseus.group_context import LONGEST_TIMEOUT, group_context
from perseus.operations import Kind
from perseus.torch.distributed.completer import Completer
from perseus.torch.distributed.launched import raise_if_ended
from perseus.torch.session import describe, keep, keep_all, tensor_over

# By perseus_code; what is not here is a lost connection or worse.
_ERRORS = {
    0: c10d.ErrorType.SUCCESS,
    4: c10d.ErrorType.TIMEOUT,
    5: c10d.ErrorType.REMOTE_ERROR,  # a rank has ended it, or told of its own failure
}


_numbers = count(1)  # of this process's worlds
_LEAVE_SECONDS = 5.0


class InPlace:
    """What makes tensors of an operation's output where the core has written them itself."""

    __slots__ = ("keeps", "tensors")

    def __init__(self, tensors: list[torch.Tensor], keeps: bool = False) -> None:
        """keeps: whether nobody else refers to the output, which may still be used on a GPU."""
        self.tensors, self.keeps = tensors, keeps

    def __call__(self, output: Any) -> list[torch.Tensor]:
        if self.keeps:
            keep(output)
        return self.tensors


# A handle of World.operations, and what makes tensors of the operation's output.
Piece = tuple[int, Callable[[Any], list[torch.Tensor]]]


class Begun(Protocol):
    """A collective of this rank."""

    def settle(self) -> None:
        """Wait until it is done. Others get its error."""


class _Left:
    """What is left of a work to which nobody refers."""

    __slots__ = ("counts", "lock", "pieces")

    def __init__(self, pieces: list[Piece], counts: bool) -> None:
        self.pieces, self.counts = pieces, counts
        self.lock = threading.Lock()  # of who ends it


def _settings_of(number: int) -> list[str]:
    """Settings that keep worlds from writing over the files of a process's first one.

    Every other one has a timeline file of its own, and no tuner's log.
    """
    settings = []
    if number > 1 or basics.is_initialized():
        settings.append(f"HOROVOD_AUTOTUNE_LOG={os.devnull}")
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if number > 1 and path not in ("", "DYNAMIC"):
        stem, suffix = os.path.splitext(path)
        process = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        settings.append(f"HOROVOD_TIMELINE={stem}.process{process}.group{number}{suffix}")
    return settings


def _seconds_of(timeout: timedelta) -> int:
    """A timeout as the core takes it: whole seconds, and no more than it can count."""
    return min(max(1, math.ceil(timeout.total_seconds())), LONGEST_TIMEOUT)


def wrap(
    buffer: Any, shape: tuple[int, ...], like: torch.Tensor, received: tuple[int, ...] | None
) -> Any:
    """A tensor over memory that the core allocated; with the received splits if asked.

    Splits count elements here, and not rows, so that they may exceed 32 bits.
    """
    output = tensor_over(buffer, shape, like)
    return output if received is None else (output, received)


class Keeper(Protocol):
    """Keeps something of a world for the next one."""

    def end(self, world: Any) -> None:
        """Take it: nothing is under way any more, and the context still answers."""


class World:
    """Ranks 0 … size - 1 of a process group, connected by the core."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connect to the other ranks: see group_context().

        store: torch's store, with a prefix of this group's own. timeout: rounded up to seconds; at
        most LONGEST_TIMEOUT counts.
        """
        self.rank, self.size = rank, size
        self._left = False  # by this rank's own will
        self.keepers: WeakSet[Keeper] = WeakSet()
        self.seconds = _seconds_of(timeout)
        settings = _settings_of(next(_numbers))
        self.context = group_context(
            store, rank, size, self.seconds, settings=settings, interrupted=raise_if_ended
        )
        self.operations = _core.Operations(self.context, wrap, describe)
        self.completer = Completer()
        # Those that are not done, for barriers. Changed by single operations of dictionaries alone,
        # because the garbage collector may end a work anywhere, and so any thread may.
        self._begun: dict[int, ref[Begun]] = {}
        self.left: dict[_Left, None] = {}
        self._unseen = Failures()  # of what is left

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for ranks that live no longer than this from now on, also for what is under way."""
        self.seconds = _seconds_of(timeout)
        self.context.set_stall_limits(self.seconds, self.seconds)

    @property
    def has_left(self) -> bool:
        """Whether this rank has ended the world, or left it, by its own will."""
        return self._left

    def error(self) -> Any:
        """Why the world has ended, as a c10d.ErrorType: SUCCESS while it has not."""
        if self._left:
            return c10d.ErrorType.COMM_ERROR
        return _ERRORS.get(self.context.failure_code(), c10d.ErrorType.COMM_ERROR)

    def failure(self) -> str | None:
        """Why the world has ended, in words; None while it has not, or if this rank has left."""
        return None if self._left else self.context.failure()

    def await_all(self) -> None:
        """Return once every rank has called this, or the world has failed.

        What nobody refers to is written by then, unless it takes some seconds more.
        """
        with contextlib.suppress(HorovodInternalError):
            self.operations.synchronize(self.operations.submit(Kind.BARRIER, "leave", None))
        deadline = time.monotonic() + _LEAVE_SECONDS
        for left in list(self.left):
            # Some rank may never have started its part. close() ends what is not done.
            with contextlib.suppress(Exception):
                for handle, _ in left.pieces if left.counts else []:
                    self.operations.wait(handle, max(0.0, deadline - time.monotonic()))
        self.end_left()

    def begun(self, work: Begun) -> None:
        """Let the barriers that follow wait for it, until settled()."""
        self._begun[id(work)] = ref(work)

    def settled(self, work: Begun) -> None:
        """Let no barrier wait for it any more."""
        self._begun.pop(id(work), None)

    def under_way(self) -> list[Callable[[], object]]:
        """Return what waits for the collectives of this rank that nobody has waited for yet."""
        works = [work for each in list(self._begun.values()) if (work := each()) is not None]
        left = [each for each in list(self.left) if each.counts]
        return [*(work.settle for work in works), *(partial(self._settle, each) for each in left)]

    def abandon(self, pieces: list[Piece], counts: bool) -> None:
        """End operations for which nobody waits, once they are done.

        counts: whether barriers wait for them. It does not block, because the garbage collector may
        call it anywhere. It copies nothing either: the caller may be within a mode of torch. What
        has to be copied waits for the next operation.
        """
        self.left[_Left(pieces, counts)] = None
        self.end_left(copies=False)

    def end_left(self, copies: bool = True) -> None:
        """End those of them that are done; the others are looked at again.

        copies: whether also those whose output is not in place.
        """
        for each in list(self.left):
            if not copies and not all(isinstance(finish, InPlace) for _, finish in each.pieces):
                continue
            # Another thread may end it, or a call that the garbage collector interrupts here.
            if each.lock.acquire(blocking=False):
                try:
                    if all(self._is_done(handle) for handle, _ in each.pieces):
                        self._finish(each)
                finally:
                    each.lock.release()

    def _is_done(self, handle: int) -> bool:
        try:
            return self.operations.poll(handle)
        except Exception:  # it is not known any more
            return True

    def _settle(self, left: _Left) -> None:
        with left.lock:
            self._finish(left)

    def _finish(self, left: _Left) -> None:
        """Wait for it, and end it. Called with its lock."""
        while left.pieces:
            handle, finish = left.pieces[0]
            try:
                output = self.operations.synchronize(handle)
                if isinstance(finish, InPlace):
                    keep_all(output)  # what is done may still be copied to its GPU
                elif output is not None:
                    finish(output)
            except Exception as error:
                if left.counts:
                    self._unseen.add(error)
            del left.pieces[0]
        self.left.pop(left, None)

    def raise_unseen(self) -> None:
        """Raise what collectives have raised for whose end nobody waits."""
        unseen, self._unseen = self._unseen, Failures()
        unseen.raise_first()

    def shutdown(self) -> None:
        """End the world on every rank: operations that are pending there fail."""
        self._left = True
        self.context.shutdown()

    def close(self) -> None:
        """Leave the world and free it."""
        self.shutdown()
        self.operations.close()
        self.completer.end()
        try:
            for keeper in list(self.keepers):
                keeper.end(self)
        finally:
            self.context.close()
