"""Bundles gradients that one operation reduces together. Pure functions, thread-safe."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` contiguous parts, the first of which may have one item more."""
    size, larger = divmod(len(items), count)
    starts = [part * size + min(part, larger) for part in range(count + 1)]
    return [items[starts[part] : starts[part + 1]] for part in range(count)]


def bundles(
    keys: Sequence[Hashable], groups: int | Sequence[Sequence[Hashable]] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the bundles as tuples of positions in `keys`; every position occurs once.

    groups: None gives each key its own bundle. A number gives that many contiguous parts, or fewer
        if there are fewer keys. Lists of keys give one bundle each, in the order of `keys`, without
        keys that are not in `keys`; every other key then gets its own bundle.
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
