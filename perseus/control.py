"""What ranks tell each other without a framework: process sets coming and going, lines of text.

Collective: every rank of the world calls the same functions in the same order, from one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perseus import basics
from perseus.errors import NOT_INITIALIZED

if TYPE_CHECKING:
    from perseus import _core

# enum perseus_kind.
_ALLGATHER = 1
_ADD_GROUP = 6
_REMOVE_GROUP = 7
_UINT8 = 4  # enum perseus_dtype


def add_group(ranks: Sequence[int]) -> int:
    """Make a group of these ranks; its id, the same on every rank of the world."""
    return int(_run(_ADD_GROUP, "add", numbers=ranks))


def remove_group(group: int) -> None:
    """End a group; what is pending there fails on its members."""
    _run(_REMOVE_GROUP, "remove", numbers=[group])


def gather_lines(line: str, name: str) -> list[str]:
    """Every rank's line of text, in rank order."""
    data = (line + "\n").encode()
    memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
    gathered: bytes = _run(_ALLGATHER, name, memory)
    return gathered.decode().splitlines()


def _run(kind: int, name: str, memory: Any = None, numbers: Sequence[int] | None = None) -> Any:
    if not basics.is_initialized():
        raise ValueError(NOT_INITIALIZED)
    operations = _door.operations
    handle = operations.submit(kind, name, memory, None, 0, 1.0, 1.0, 0, numbers, 0)
    return operations.synchronize(handle)


class _Door:
    """The handles of the running world's control operations."""

    operations: _core.Operations

    def attach(self) -> None:
        operations = basics.operations(_as_bytes, _describe)
        if operations is not None:
            self.operations = operations


def _as_bytes(buffer: Any, *_: Any) -> bytes:
    return bytes(buffer)


def _describe(memory: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return ctypes.addressof(memory), (len(memory),), (1,), _UINT8


_door = _Door()
basics.at_init(_door.attach)
