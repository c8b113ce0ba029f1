"""The world of one process group: its context in the core, which no other group shares.

Groups therefore fail, time out and end apart from each other, as torch's do. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import math
import os
from datetime import timedelta
from itertools import count
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from perseus import _core, basics
from perseus.errors import HorovodInternalError
from perseus.group_context import LONGEST_TIMEOUT, group_context
from perseus.operations import Kind
from perseus.torch.distributed.completer import Completer
from perseus.torch.distributed.launched import raise_if_ended
from perseus.torch.distributed.pending import Pending
from perseus.torch.session import describe, tensor_over

# By perseus_code; what is not here is a lost connection or worse.
_ERRORS = {
    0: c10d.ErrorType.SUCCESS,
    4: c10d.ErrorType.TIMEOUT,
    5: c10d.ErrorType.REMOTE_ERROR,  # a rank has ended it, or told of its own failure
}


_numbers = count(1)  # of this process's worlds


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
        self.pending = Pending(self.operations)

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
        self.pending.leave()

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
