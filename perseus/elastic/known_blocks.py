"""Gives all ranks the values of rank 0, but sends only those blocks that some rank lacks.

Ranks that have been fed (feeding.py), or that have loaded the same file, need little. Belongs to
the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from perseus import _core, basics, control, feeding
from perseus.feeding import BLOCK, HASH, blocks_of

_BYTES_AT_ONCE = 1 << 24
_fed: Mapping[bytes, bytes] | None = None


@contextlib.contextmanager
def used(fed: Mapping[bytes, bytes]) -> Iterator[None]:
    """Have take_over() do what it says in here, on all ranks. fed: this rank's blocks, by hash."""
    global _fed
    _fed = fed
    try:
        yield
    finally:
        _fed = None


@contextlib.contextmanager
def used_if_fed() -> Iterator[None]:
    """Use what the ranks of an elastic job have been fed, if any has. Afterwards it is dropped."""
    member = basics.membership()
    if member is None or member.place is None:
        yield
        return
    blocks = feeding.attach(member).blocks
    try:
        with used(blocks) if member.place.fed else contextlib.nullcontext():
            yield
    finally:
        blocks.clear()


def are_used() -> bool:
    """Whether take_over() may be called; the same on all ranks."""
    return _fed is not None


def take_over(arrays: Sequence[memoryview | None], layout: Sequence[object]) -> bool:
    """Give these arrays rank 0's contents. Return false, and change nothing, if that cannot be.

    arrays: contiguous bytes that can be written, as many and as long on all ranks; otherwise it is
        false on all ranks. None stands for one that the caller has to broadcast.
    layout: what must be the same on all ranks, too, as it is written: shapes and dtypes.

    Collective.
    """
    assert _fed is not None
    lengths = [None if each is None else len(each) for each in arrays]
    written = _core.hash_bytes(repr((lengths, layout)).encode()).to_bytes(8, "little")
    if len(set(control.gather_equal(written, "elastic.layout", 0))) > 1:
        return False
    views = [each for each in arrays if each is not None and len(each) > 0]
    if not views:
        return True
    own = b"".join(_core.hash_blocks(view, BLOCK) for view in views)
    wanted = bytearray(own)
    control.broadcast_bytes(wanted, 0, "elastic.hashes")
    blocks = [block for view in views for block in blocks_of(view)]
    lacks = bytearray(len(blocks))
    for number, block in enumerate(blocks):
        hashed = bytes(wanted[HASH * number : HASH * (number + 1)])
        if own[HASH * number : HASH * (number + 1)] == hashed:
            continue
        found = _fed.get(hashed)
        if found is not None and len(found) == len(block):
            block[:] = found
        else:
            lacks[number] = 1
    missing = 0
    for of_rank in control.gather_equal(bytes(lacks), "elastic.missing", 0):
        missing |= int.from_bytes(of_rank, "little")
    sent = missing.to_bytes(len(blocks), "little")
    _broadcast([block for block, is_sent in zip(blocks, sent, strict=True) if is_sent])
    return True


def _broadcast(blocks: Sequence[memoryview]) -> None:
    """Give all ranks rank 0's blocks, many at once."""
    is_root = basics.rank() == 0
    at_once = _BYTES_AT_ONCE // BLOCK
    for first in range(0, len(blocks), at_once):
        batch = blocks[first : first + at_once]
        data = bytearray().join(batch) if is_root else bytearray(sum(map(len, batch)))
        control.broadcast_bytes(data, 0, "elastic.blocks")
        place = 0
        for block in batch if not is_root else ():
            block[:] = data[place : place + len(block)]
            place += len(block)
