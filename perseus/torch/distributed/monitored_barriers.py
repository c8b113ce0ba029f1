"""torch.distributed.monitored_barrier for groups of this backend, before torch 2.14.

Those versions refuse it for every backend but gloo. Any thread may call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d


class Group(Protocol):
    """What a process group of this backend has for it."""

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """See backend.py."""


def allow_monitored_barriers(group_of: Callable[[Any], Group | None]) -> None:
    """Wrap torch's function; calls for groups of other backends go on to it.

    group_of: returns what a process group has of this backend, or None.
    """
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        ours = None
        if group != dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
            ours = group_of(group or dist.group.WORLD)
        if ours is None:
            original(group, timeout, wait_all_ranks)
            return
        options = None
        if timeout is not None:
            options = c10d.BarrierOptions()
            limited = isinstance(timeout, timedelta)
            options.timeout = timeout if limited else timedelta(seconds=timeout)
        ours.monitored_barrier(options, wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
