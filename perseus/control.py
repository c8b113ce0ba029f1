"""Exchanges between ranks without a framework: changes of process sets, text, bytes, objects.

Collective: every rank of the group calls the same functions in the same order, from one thread.
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perseus import basics, objects
from perseus.arguments import checked_root
from perseus.errors import NOT_INITIALIZED, HorovodInternalError, MismatchError
from perseus.operations import Kind

if TYPE_CHECKING:
    from perseus import _core

_UINT8 = 4  # enum perseus_dtype
_JOINED = "is not supported with Join"  # what the core says of allgathers
_SIZE_SIZE, _CODE_SIZE = 8, 32
_HEAD_SIZE = _SIZE_SIZE + 2 * _CODE_SIZE


def add_group(ranks: Sequence[int]) -> int:
    """Create a group of these ranks; returns its id, the same on every rank of the world."""
    group = int(_run(Kind.ADD_GROUP, "add", numbers=ranks))
    _keys.forget(group)
    return group


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


def gather_if_different(
    summary: bytes, details: Callable[[], bytes], name: str, group: int
) -> list[bytes] | None:
    """Every rank's details, in the group's rank order, if the summaries differ; else None.

    summary: such as a hash of the details; the lengths are equal on all ranks. Nothing is compared,
    so the result is None, while a rank waits in join().
    """
    try:
        summaries = gather_equal(summary, name, group)
    except MismatchError as error:
        if _JOINED in str(error):
            return None
        raise
    return None if len(set(summaries)) == 1 else gather_bytes(details(), name, group)


def broadcast_bytes(data: bytearray, root_rank: int, name: str) -> None:
    """Overwrite the data with the root's, which is as long."""
    memory = (ctypes.c_char * len(data)).from_buffer(data)
    _run(Kind.BROADCAST, name, memory, output=memory, root=root_rank)


def broadcast_object(obj: Any, root_rank: int, name: str | None, group: int) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere.

    obj: anything cloudpickle can write; ignored on the others. root_rank: a global rank. name:
        without one, ranks must pass objects of the same type, whose name is used.
    HorovodInternalError where what came is not from that rank.
    """
    is_root = basics.rank() == checked_root(root_rank, "broadcast")
    seal = _Seal(type(obj).__name__ if name is None else name, group)
    data = objects.dumps(obj) if is_root else b""
    head = _memory_of(seal.head(data) if is_root else bytes(_HEAD_SIZE))
    _run(Kind.BROADCAST, f"{seal.name}.sz", head, output=head, root=root_rank, group=group)
    memory = _memory_of(data) if is_root else (ctypes.c_char * seal.size(head.raw, root_rank))()
    _run(Kind.BROADCAST, f"{seal.name}.t", memory, output=memory, root=root_rank, group=group)
    return obj if is_root else seal.open(head.raw, memoryview(memory).cast("B"), root_rank)


def allgather_object(obj: Any, name: str | None, group: int) -> list[Any]:
    """Every rank's object, in the group's rank order. See broadcast_object."""
    seal = _Seal(type(obj).__name__ if name is None else name, group)
    data = objects.dumps(obj)
    heads = gather_equal(seal.head(data), f"{seal.name}.sz", group)
    senders = basics.group_ranks(group)
    assert senders is not None
    signed = list(zip(senders, heads, strict=True))
    sizes = [seal.size(head, sender) for sender, head in signed]
    gathered = memoryview(_gather(data, f"{seal.name}.t", group))
    opened = []
    for (sender, head), size in zip(signed, sizes, strict=True):
        opened.append(seal.open(head, gathered[:size], sender))
        gathered = gathered[size:]
    return opened


class _Seal:
    """Shows which rank has sent an object, and what for: a pickle can run any code.

    A head goes before each pickle: its size, its authentication code, and one of these two. Nothing
    is allocated for a size, and nothing unpickled, before the codes are right.
    """

    def __init__(self, name: str, group: int) -> None:
        self.name = name
        self._group = group
        self._key = _keys.of(group)

    def head(self, pickled: bytes) -> bytes:
        """What goes before an object of this rank."""
        size = len(pickled).to_bytes(_SIZE_SIZE, "little")
        sender = basics.rank()
        start = size + self._code("object", sender, pickled)
        return start + self._code("head", sender, start)

    def size(self, head: bytes, sender: int) -> int:
        """The size of the pickle that follows the head."""
        self._check("head", sender, head[:-_CODE_SIZE], head[-_CODE_SIZE:])
        return int.from_bytes(head[:_SIZE_SIZE], "little")

    def open(self, head: bytes, pickled: memoryview, sender: int) -> Any:
        """The object that followed the head."""
        self._check("object", sender, pickled, head[_SIZE_SIZE:-_CODE_SIZE])
        return objects.loads(pickled)

    def _check(self, what: str, sender: int, data: bytes | memoryview, code: bytes) -> None:
        if not hmac.compare_digest(code, self._code(what, sender, data)):
            raise HorovodInternalError(
                f"[objects] what came from rank {sender} as {self.name!r} has a wrong "
                f"authentication code: it has changed on its way, or is not from that rank; see "
                f"docs/security.md"
            )

    def _code(self, what: str, sender: int, data: bytes | memoryview) -> bytes:
        purpose = f"{what} {sender} {self._group} {self.name}\0".encode()
        code = hmac.new(self._key, purpose, "sha256")
        code.update(data)
        return code.digest()


class _Keys:
    """The keys under which the groups of the running world make codes.

    A key follows from the job's secret and from a random number of every member, made for this
    world, so that nobody can send again what an earlier job with the same secret has sent.
    """

    def __init__(self) -> None:
        self._of_group: dict[int, bytes] = {}
        # Groups work at the same time, from threads that do not wait for each other.
        self._locks: dict[int, threading.Lock] = {}

    def of(self, group: int) -> bytes:
        """The group's key. Its first use is a collective of the group's ranks."""
        with self._locks.setdefault(group, threading.Lock()):
            if group not in self._of_group:
                numbers = _gather(secrets.token_bytes(_CODE_SIZE), "objects.key", group)
                self._of_group[group] = basics.derived_key(b"perseus objects" + numbers)
            return self._of_group[group]

    def forget(self, group: int) -> None:
        """A new group has this number."""
        self._of_group.pop(group, None)

    def forget_all(self) -> None:
        """A new world has begun."""
        self._of_group.clear()


def _gather(data: bytes, name: str, group: int) -> bytes:
    gathered: bytes = _run(Kind.ALLGATHER, name, _memory_of(data), group=group)
    return gathered


def _memory_of(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


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
        operations = basics.operations(_as_bytes, describe_memory)
        if operations is not None:
            self.operations = operations


def _as_bytes(buffer: Any, *_: Any) -> bytes:
    return bytes(buffer)


def describe_memory(memory: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Describe an array of ctypes' characters to the core: address, shape, strides, dtype."""
    return ctypes.addressof(memory), (len(memory),), (1,), _UINT8


_door = _Door()
_keys = _Keys()
basics.at_init(_door.attach)
basics.at_init(_keys.forget_all)
