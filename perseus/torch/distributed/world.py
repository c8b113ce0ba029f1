"""The world of one process group: its context in the core, which no other group shares.

Groups therefore fail, time out and end apart from each other, as torch's do. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from perseus import _core
from perseus.errors import HorovodInternalError
from perseus.group_context import group_context
from perseus.operations import Kind
from perseus.torch.session import describe, wrap


class World:
    """Ranks 0 … size - 1 of a process group, connected by the core."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connect to the other ranks: see group_context().

        store: torch's store, with a prefix of this group's own. timeout: rounded up to seconds.
        """
        self.rank, self.size = rank, size
        self.seconds = max(1, math.ceil(timeout.total_seconds()))
        self.context = group_context(store, rank, size, self.seconds)
        self.operations = _core.Operations(self.context, wrap, describe)

    def await_all(self) -> None:
        """Return once every rank has called this, or the world has failed."""
        with contextlib.suppress(HorovodInternalError):
            self.operations.synchronize(self.operations.submit(Kind.BARRIER, "leave", None))

    def shutdown(self) -> None:
        """End the world on every rank: operations that are pending there fail."""
        self.context.shutdown()

    def close(self) -> None:
        """Leave the world and free it."""
        self.context.shutdown()
        self.operations.close()
        self.context.close()
