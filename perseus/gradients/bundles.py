"""Which gradients one operation reduces together. Pure functions, thread-safe."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """The items in `count` contiguous parts; the first ones have one more where it is uneven."""
    size, larger = divmod(len(items), count)
    starts = [part * size + min(part, larger) for part in range(count + 1)]
    return [items[starts[part] : starts[part + 1]] for part in range(count)]


def bundles(
    keys: Sequence[Hashable], groups: int | Sequence[Sequence[Hashable]] | None
) -> tuple[tuple[int, ...], ...]:
    """The positions of the keys that each operation reduces; every position occurs once.

    groups: None: each key by itself. A number: so many contiguous parts, fewer where there are
        fewer keys. Lists of keys: these, each in the order of `keys`, without the keys that are not
        there; then the rest, each by itself.
    """
    if groups is None or not keys:
        return tuple((position,) for position in range(len(keys)))
    if isinstance(groups, int):
        return tuple(tuple(part) for part in split(range(len(keys)), min(groups, len(keys))))
    position_of = {key: position for position, key in enumerate(keys)}
    grouped = [
        tuple(sorted(position_of[key] for key in group if key in position_of)) for group in groups
    ]
    taken = {position for bundle in grouped for position in bundle}
    single = [(position,) for position in range(len(keys)) if position not in taken]
    return (*(bundle for bundle in grouped if bundle), *single)
