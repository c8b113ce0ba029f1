"""Saves and restores the residuals that lossy codecs keep of one set of gradients.

The core owns the residuals. This module keeps those that were loaded but that the core cannot take
yet, because the next world has not begun or their reduction has no name so far. Belongs to the
thread that steps the optimizer.
"""

from __future__ import annotations

import json
import struct
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from perseus import basics
from perseus.process_sets import ProcessSet

# The residuals of one reduction: (layout, data). The layout is the core's number for the placement
# of ranks, combined with the name by mark(), in its lower 64 bits. Above them are its number for
# the shapes and memory orders of the tensors, and the bits of the factor of results; what has 0
# there was saved without them. The data is a
# buffer of float32 of shape (2, n) for n elements: the residuals of what this rank sends, then of
# the results that it owns.
Held = tuple[int, Any]

_LENGTH = struct.Struct("<Q")
_END = b"perseus.residuals"  # of a file; the number of bytes that precede it is in front
_FOREIGN = "[residuals] this is not what Perseus has saved"
_TORN = "[residuals] a part of what Perseus has saved is missing"


class Residuals:
    """The residuals of one reducer's gradients.

    number: identifies the gradients; see basics.new_gradients. process_set: the ranks that reduce
    them; it may be removed, and get another number later. waiting: residuals that the core has not
    been given yet, by key.

    The core raises ValueError while one of the reductions is in flight.
    """

    def __init__(self, number: int, process_set: ProcessSet) -> None:
        self._number = number
        self._process_set = process_set
        self._reductions: dict[str, tuple[str, bool]] = {}
        self.waiting: dict[str, Held] = {}
        _living.add(self)

    def know(self, key: str, name: str, grouped: bool) -> None:
        """Record the name under which the gradients with this key in checkpoints are reduced.

        grouped: whether one operation reduces several gradients. If the name has changed, since
        another world gave it another number, what the core has under the old name waits again.
        """
        known = self._reductions.get(key)
        if known is not None and known[0] != name and key not in self.waiting:
            found = self._read(key)
            if found is not None:
                self.waiting[key] = found
        self._reductions[key] = name, grouped

    def drop(self, key: str) -> None:
        """Forget a key; the name that know() was told may be given to other gradients.

        Therefore, the core's residual under this name becomes zero. None of it may be in flight.
        """
        self.waiting.pop(key, None)
        if key not in self._reductions:
            return
        found = self._read(key)
        if found is not None:
            self.waiting[key] = found[0], bytes(len(found[1]))
            self.hand_over(key)
        del self._reductions[key]

    def forget_names(self) -> None:
        """Keep what is waiting until know() tells names again: a new world may give others."""
        self._reductions.clear()

    def read(self) -> dict[str, Held]:
        """Return copies of all residuals, by key."""
        held = {key: (layout, bytearray(data)) for key, (layout, data) in self.waiting.items()}
        for key in self._reductions.keys() - held.keys():
            found = self._read(key)
            if found is not None:
                held[key] = found
        return held

    def _read(self, key: str) -> Held | None:
        """Return a copy of what the core has for a key; None if it has nothing."""
        group = self._present_group()
        if group is None:
            return None
        name, grouped = self._reductions[key]
        found = basics.read_residual(self._number, group, name, grouped)
        return None if found is None else (found[0] ^ mark(key, name), found[1])

    def replace(self, held: Mapping[str, Held]) -> None:
        """Replace all residuals by a result of read(). The core must have dropped the old ones."""
        self.waiting = dict(held)

    def hand_over(self, key: str) -> None:
        """Give the core the waiting residuals of a key, if any, before its next reduction."""
        group = self._process_set.process_set_id
        if group is None:
            return
        if key in self.waiting:
            layout, data = self.waiting[key]
            name, grouped = self._reductions[key]
            held = layout ^ mark(key, name), data
            basics.write_residual(self._number, group, name, grouped, held)
            del self.waiting[key]

    def hand_over_known(self) -> None:
        """Give the core all waiting residuals whose reductions have names, if this rank takes part
        in the present world."""
        if self._present_group() is not None:
            for key in self._reductions.keys() & self.waiting.keys():
                self.hand_over(key)

    def _present_group(self) -> int | None:
        """Return the number of the process set; None if this rank has no core state in it."""
        group = self._process_set.process_set_id
        if group is None or not basics.is_initialized():
            return None
        return group if basics.rank() in (basics.group_ranks(group) or ()) else None

    def carry_over(self) -> None:
        """Keep the residuals for the next world, because the present one is about to end."""
        self.waiting = self.read()


def own(residuals: Mapping[str, Held], owner: int | None) -> dict[str, Held]:
    """Return a file's residuals if this rank owns them, or if owner is None; else {}."""
    known = owner is None or (basics.is_initialized() and owner == basics.rank())
    return dict(residuals) if known else {}


@runtime_checkable
class Source(Protocol):
    """An object with residuals that checkpoints save and restore."""

    def residuals(self) -> dict[str, Held]:
        """Return copies of all residuals, by key."""

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """Replace all residuals by a result of residuals().

        owner: the rank that saved them, if they come from a file; other ranks begin without any.
        """


def pack(held: Mapping[str, Held], rank: int) -> bytes:
    """Serialise a rank's residuals: a line of JSON, the data, and a dot.

    The dot protects the data, because NumPy strips zeros from the end of strings.
    """
    index = [[key, layout, len(data)] for key, (layout, data) in held.items()]
    line = json.dumps({"rank": rank, "held": index}).encode()
    return b"".join([line, b"\n", *(bytes(data) for _, data in held.values()), b"."])


def unpack(string: bytes) -> tuple[dict[str, Held], int]:
    """Return (residuals, rank), the arguments of pack(); raise ValueError for other strings."""
    line, found, numbers = bytes(string).partition(b"\n")
    held: dict[str, Held] = {}
    try:
        index = json.loads(line)
        first = 0
        for key, layout, length in index["held"]:
            checked_entry(key, layout)
            if type(length) is not int or length < 0:
                raise TypeError
            held[key] = layout, numbers[first : first + length]
            first += length
        rank = index["rank"]
        if type(rank) is not int:
            raise TypeError
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(_FOREIGN) from error
    if not found or len(numbers) != first + 1:
        raise ValueError(_TORN)
    return held, rank


def checked_entry(key: Any, layout: Any) -> None:
    """Raise ValueError unless these are a key and a layout, as far as their types tell."""
    if not isinstance(key, str) or type(layout) is not int or not 0 <= layout < 1 << 160:
        raise ValueError(_FOREIGN)


def pack_at_end(held: Mapping[str, Held], rank: int) -> bytes:
    """Return what to append to a file so that unpack_at_end() finds these residuals in it.

    It is empty without residuals, which leaves a framework's file as it is.
    """
    if not held:
        return b""
    data = pack(held, rank)
    return data + _LENGTH.pack(len(data)) + _END


def unpack_at_end(content: bytes) -> tuple[dict[str, Held], int] | None:
    """Return (residuals, rank) of a file with this content; None if it has none.

    Raises ValueError if what is at its end is damaged.
    """
    if not content.endswith(_END):
        return None
    end = len(content) - len(_END) - _LENGTH.size
    if end < 0:
        raise ValueError(_TORN)
    (length,) = _LENGTH.unpack_from(content, end)
    if length > end:
        raise ValueError(_TORN)
    return unpack(content[end - length : end])


def mark(key: str, name: str) -> int:
    """Return a number that is combined with a layout so that it changes along with the name.

    The name determines which rank owns which results, so residuals under another name do not fit
    the owners any more and are sent at once. It is 0 if keys are names.
    """
    return 0 if key == name else zlib.crc32(name.encode())


_living: weakref.WeakSet[Residuals] = weakref.WeakSet()


def hand_over_known() -> None:
    """Give the core the waiting residuals of all process sets that are registered by now."""
    for residuals in _living:
        if residuals.waiting:
            residuals.hand_over_known()


def _carry_over() -> None:
    for residuals in _living:
        residuals.carry_over()


# A core whose start fails is freed, and what it has been given with it.
basics.at_begin(hand_over_known)
basics.at_flush(hand_over_known)
basics.at_reset(_carry_over)
