"""The world of one process group: its context in the core, which no other group shares.

Groups therefore fail, time out and end apart from each other, as torch's do. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
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
_MANY_BEGUN = 64


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

    @property
    def is_settled(self) -> bool:
        """Whether somebody has waited for it until it was done."""

    def settle(self) -> None:
        """Wait until it is done. Others get its error."""


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
        # Of works that nobody refers to, and whether they are in the order of all ranks.
        self.abandoned: deque[tuple[list[Piece], bool]] = deque()
        self._unseen = Failures()
        self._begun: deque[ref[Begun]] = deque()
        self._most_begun = _MANY_BEGUN

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

        What nobody refers to is written by then.
        """
        with contextlib.suppress(HorovodInternalError):
            self.operations.synchronize(self.operations.submit(Kind.BARRIER, "leave", None))
        for settle in self.under_way():
            settle()

    def begun(self, work: Begun) -> None:
        """Let the barriers that follow wait for it, too."""
        self._begun.append(ref(work))
        if len(self._begun) >= self._most_begun:
            self._most_begun = max(_MANY_BEGUN, 2 * len(self._unsettled()))

    def _unsettled(self) -> list[Begun]:
        found = []
        for _ in range(len(self._begun)):
            try:
                each = self._begun.popleft()
            except IndexError:  # another thread does the same
                break
            work = each()
            if work is not None and not work.is_settled:
                found.append(work)
                self._begun.append(each)
        return found

    def under_way(self) -> list[Callable[[], object]]:
        """Return what waits for the collectives of this rank that nobody has waited for yet."""
        waiting: list[Callable[[], object]] = [work.settle for work in self._unsettled()]
        for _ in range(len(self.abandoned)):
            try:
                pieces, in_order = self.abandoned.popleft()
            except IndexError:  # another thread does the same
                break
            if in_order:
                waiting.append(partial(self._finish, pieces))
            else:  # the other half of a send or receive may come after the barrier
                self.abandoned.append((pieces, in_order))
        return waiting

    def abandon(self, pieces: list[Piece], in_order: bool) -> None:
        """End operations for which nobody waits, once they are done.

        in_order: whether all ranks have them in one order, as collectives. It does not block and
        takes no lock, because the garbage collector may call it anywhere. It copies nothing either:
        the caller may be within a mode of torch. What has to be copied waits for the next
        operation.
        """
        self.abandoned.append((pieces, in_order))
        self.end_abandoned(copies=False)

    def end_abandoned(self, copies: bool = True) -> None:
        """Finish those of them that are done; the others are looked at again.

        copies: whether also those whose output is not in place.
        """
        for _ in range(len(self.abandoned)):
            try:
                each = pieces, in_order = self.abandoned.popleft()
            except IndexError:  # another thread does the same
                return
            ends = copies or all(isinstance(finish, InPlace) for _, finish in pieces)
            with contextlib.suppress(Exception):  # an unknown handle is done
                if ends and all(self.operations.poll(handle) for handle, _ in pieces):
                    self._finish(pieces, in_order)
                else:
                    self.abandoned.append(each)

    def _finish(self, pieces: list[Piece], in_order: bool = True) -> None:
        try:
            for handle, finish in pieces:
                output = self.operations.synchronize(handle)
                if isinstance(finish, InPlace):
                    keep_all(output)  # what is done may still be copied to its GPU
                else:
                    finish(output)
        except Exception as error:
            if in_order:
                self._unseen.add(error)

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
