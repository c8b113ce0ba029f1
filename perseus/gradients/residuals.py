"""What lossy codecs hold back of one set of gradients, to be saved and brought back.

It lies in the core; here is what was loaded and the core has not been given yet, which may have to
wait for the next world, or for the reduction to get a name. Belongs to the thread that steps the
optimizer.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from perseus import basics

# (core's number for the placement of ranks, and of the name, see _mark; 2 n numbers of float32 as a
# buffer of bytes: of n elements what this rank sends, then of the results that it owns)
Held = tuple[int, Any]


class Residuals:
    """number: of the gradients, see basics.new_gradients. group: of their process set.

    ValueError from the core where a reduction is under way.
    """

    def __init__(self, number: int, group: int | None) -> None:
        self._number = number
        self._group = group or 0
        self._reductions: dict[str, tuple[str, bool]] = {}
        self.waiting: dict[str, Held] = {}
        _living.add(self)

    def know(self, key: str, name: str, grouped: bool) -> None:
        """What checkpoints call `key` is reduced under this name."""
        self._reductions[key] = name, grouped

    def read(self) -> dict[str, Held]:
        """Copies of all there are, by key."""
        held = {key: (layout, bytearray(data)) for key, (layout, data) in self.waiting.items()}
        if not basics.is_initialized():
            return held
        for key, (name, grouped) in self._reductions.items():
            if key not in held:
                found = basics.read_residual(self._number, self._group, name, grouped)
                if found is not None:
                    held[key] = found[0] ^ _mark(key, name), found[1]
        return held

    def replace(self, held: Mapping[str, Held]) -> None:
        """Go on with these, as read() gave them; the core must have forgotten what it had."""
        self.waiting = dict(held)

    def hand_over(self, key: str) -> None:
        """Give the core what waits for it under a key that is about to be reduced."""
        layout, data = self.waiting.pop(key, (0, None))
        if data is not None:
            name, grouped = self._reductions[key]
            held = layout ^ _mark(key, name), data
            basics.write_residual(self._number, self._group, name, grouped, held)

    def hand_over_known(self) -> None:
        """The same of all that have a name, if this rank takes part in the present world."""
        if basics.rank() in (basics.group_ranks(self._group) or ()):
            for key in self._reductions.keys() & self.waiting.keys():
                self.hand_over(key)

    def take_along(self) -> None:
        """The world is about to end, and the next one is to go on with these."""
        self.waiting = self.read()


def own(residuals: Mapping[str, Held], owner: int | None) -> dict[str, Held]:
    """Those of a file if this rank, or None, held them; else none: others begin with nothing."""
    known = owner is None or (basics.is_initialized() and owner == basics.rank())
    return dict(residuals) if known else {}


@runtime_checkable
class Source(Protocol):
    """Where they are, for those who save them."""

    def residuals(self) -> dict[str, Held]:
        """Copies of all there are."""

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """Have these, as residuals() gave them, take the place of all that was before.

        owner: the rank that held them, where they come from a file; others begin with nothing.
        """


def pack(held: Mapping[str, Held], rank: int) -> bytes:
    """What a rank holds as one string: a line of JSON, the numbers, and a dot for NumPy's sake."""
    index = [[key, layout, len(data)] for key, (layout, data) in held.items()]
    line = json.dumps({"rank": rank, "held": index}).encode()
    return b"".join([line, b"\n", *(bytes(data) for _, data in held.values()), b"."])


def unpack(string: bytes) -> tuple[dict[str, Held], int]:
    """(what was packed, the rank that held it); ValueError for other strings."""
    line, found, numbers = bytes(string).partition(b"\n")
    held: dict[str, Held] = {}
    try:
        index = json.loads(line)
        first = 0
        for key, layout, length in index["held"]:
            held[key] = layout, numbers[first : first + length]
            first += length
        rank = int(index["rank"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("[residuals] this is not what Perseus has saved") from error
    if not found or len(numbers) != first + 1:
        raise ValueError("[residuals] a part of what Perseus has saved is missing")
    return held, rank


def _mark(key: str, name: str) -> int:
    """What makes a placement another one where the name has changed, and so is sent at once.

    Who owns which results depends on the name. Where names are keys, both are the same.
    """
    return 0 if key == name else zlib.crc32(name.encode())


_living: weakref.WeakSet[Residuals] = weakref.WeakSet()


def hand_over_known() -> None:
    """Give the core what waits for it in all process sets that there are by now."""
    for residuals in _living:
        if residuals.waiting:
            residuals.hand_over_known()


def _take_along() -> None:
    for residuals in _living:
        residuals.take_along()


basics.at_init(hand_over_known)
basics.at_flush(hand_over_known)
basics.at_reset(_take_along)
