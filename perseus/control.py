"""Exchanges between ranks without a framework: changes of process sets, text, bytes, objects.

Collective: every rank of the group calls the same functions in the same order, from one thread.
"""

from __future__ import annotations

import ctypes
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perseus import basics, objects
from perseus.arguments import checked_root
from perseus.errors import NOT_INITIALIZED, HorovodInternalError
from perseus.operations import Kind

if TYPE_CHECKING:
    from perseus import _core

_UINT8 = 4  # enum perseus_dtype
_CODE = "sha256"
_CODE_SIZE = 32


def add_group(ranks: Sequence[int]) -> int:
    """Create a group of these ranks; returns its id, the same on every rank of the world."""
    return int(_run(Kind.ADD_GROUP, "add", numbers=ranks))


def remove_group(group: int) -> None:
    """End a group; its pending operations fail on its members."""
    _run(Kind.REMOVE_GROUP, "remove", numbers=[group])


def barrier() -> None:
    """Return once every rank of the world is here."""
    _run(Kind.BARRIER, "control.barrier")


def gather_lines(line: str, name: str) -> list[str]:
    """Every rank's line of text, in rank order."""
    return _gather((line + "\n").encode(), name, 0).decode().splitlines()


def gather_equal(data: bytes, name: str, group: int) -> list[bytes]:
    """Every rank's bytes, in the group's rank order; the lengths are equal."""
    gathered = _gather(data, name, group)
    return [gathered[at : at + len(data)] for at in range(0, len(gathered), len(data))]


def gather_bytes(data: bytes, name: str, group: int) -> list[bytes]:
    """Every rank's bytes, in the group's rank order; lengths may differ."""
    lengths = _gather(len(data).to_bytes(8, "little"), f"{name}.sz", group)
    gathered = memoryview(_gather(data, f"{name}.t", group))
    parts = []
    for at in range(0, len(lengths), 8):
        length = int.from_bytes(lengths[at : at + 8], "little")
        parts.append(bytes(gathered[:length]))
        gathered = gathered[length:]
    return parts


def broadcast_bytes(data: bytes, root_rank: int, name: str, group: int) -> bytes:
    """The root's bytes; what others pass is ignored. root_rank: a global rank."""
    is_root = basics.rank() == checked_root(root_rank, "broadcast")
    size = (ctypes.c_char * 8).from_buffer_copy(len(data).to_bytes(8, "little"))
    _run(Kind.BROADCAST, f"{name}.sz", size, output=size, root=root_rank, group=group)
    length = int.from_bytes(size.raw, "little")
    memory = (ctypes.c_char * length)()
    if is_root:
        memory.raw = data
    _run(Kind.BROADCAST, f"{name}.t", memory, output=memory, root=root_rank, group=group)
    return data if is_root else memory.raw


def broadcast_object(obj: Any, root_rank: int, name: str | None, group: int) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere.

    obj: anything cloudpickle can write; ignored on the others. root_rank: a global rank. name:
        without one, ranks must pass objects of the same type, whose name is used.
    HorovodInternalError where what came is not from that rank.
    """
    name = type(obj).__name__ if name is None else name
    root_rank = checked_root(root_rank, "broadcast")
    if basics.rank() == root_rank:
        broadcast_bytes(_sealed(obj, name, group), root_rank, name, group)
        return obj
    return _opened(broadcast_bytes(b"", root_rank, name, group), root_rank, name, group)


def allgather_object(obj: Any, name: str | None, group: int) -> list[Any]:
    """Every rank's object, in the group's rank order. See broadcast_object."""
    name = type(obj).__name__ if name is None else name
    parts = gather_bytes(_sealed(obj, name, group), name, group)
    ranks = basics.group_ranks(group) or range(len(parts))
    return [_opened(part, sender, name, group) for part, sender in zip(parts, ranks, strict=True)]


# A pickle can run any code, so it is read only where a rank of this world has written it, for this
# purpose: whoever can inject packets cannot make the code in front of it.
def _sealed(obj: Any, name: str, group: int) -> bytes:
    data = objects.dumps(obj)
    return _code_of(data, basics.rank(), name, group) + data


def _opened(data: bytes, sender: int, name: str, group: int) -> Any:
    code, pickled = data[:_CODE_SIZE], memoryview(data)[_CODE_SIZE:]
    if not hmac.compare_digest(code, _code_of(pickled, sender, name, group)):
        raise HorovodInternalError(
            f"[objects] what came from rank {sender} as {name!r} has a wrong authentication code: "
            f"it has changed on its way, or is not from that rank; see docs/security.md"
        )
    return objects.loads(pickled)


def _code_of(pickled: bytes | memoryview, sender: int, name: str, group: int) -> bytes:
    code = hmac.new(basics.session_key(), f"{sender} {group} {name}\0".encode(), _CODE)
    code.update(pickled)
    return code.digest()


def _gather(data: bytes, name: str, group: int) -> bytes:
    memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
    gathered: bytes = _run(Kind.ALLGATHER, name, memory, group=group)
    return gathered


def _run(
    kind: Kind,
    name: str,
    memory: Any = None,
    *,
    output: Any = None,
    numbers: Sequence[int] | None = None,
    root: int = 0,
    group: int = 0,
) -> Any:
    if not basics.is_initialized():
        raise ValueError(NOT_INITIALIZED)
    operations = _door.operations
    handle = operations.submit(kind, name, memory, output, root=root, splits=numbers, group=group)
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
