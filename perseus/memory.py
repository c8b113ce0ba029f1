"""How this process's malloc deals with memory that was freed. Any thread."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from perseus import basics

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes; blocks beyond it are mapped and unmapped one by one.
_MAP_FROM_BYTES = 32 << 20
# Of free memory at the end of the heap: a process that has become smaller does give memory back.
_KEEP_BYTES = 1 << 30


def keep_freed_memory(setting: Callable[[str], Any] = basics.setting) -> None:
    """Have malloc keep what a step of training frees for the next one, up to 1 GiB.

    Frameworks allocate results and gradients anew in every step, and glibc gives large blocks back
    to the system as they are freed: each step then begins with a page fault for every 4 KiB. Does
    nothing with PERSEUS_KEEP_FREED_MEMORY=0, where the environment sets malloc's thresholds, or
    where libc has no mallopt. Thresholds that have been set stay until the process ends.
    setting: returns a variable's value in a world; ValueError if that is this process's world and
        there is none.
    """
    if setting("PERSEUS_KEEP_FREED_MEMORY"):
        _set_thresholds()


@functools.cache
def _set_thresholds() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _user_tunes_malloc():
        mallopt(_M_MMAP_THRESHOLD, _MAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def _user_tunes_malloc() -> bool:
    thresholds = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return bool(thresholds & os.environ.keys()) or "glibc.malloc." in tunables
