"""Sizes in bytes as people write and read them. Pure functions, thread-safe."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_STEP = 4  # from one size of a range to the next
_FLOAT = 4
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def parse_sizes(text: str) -> list[int]:
    """'4,64K,64M' or '4K-64M' (steps of four) to bytes; KiB, MiB and GiB are meant.

    ValueError for anything else and for sizes that are not multiples of 4, a float32.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        size = _parse(first, text)
        end = _parse(last, text) if dash else size
        if end < size:
            raise ValueError(f"--sizes {text}: '{part}' is empty")
        while size <= end:
            sizes.append(size)
            size *= _STEP
    return sorted(set(sizes))


def _parse(part: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", part.strip().lower())
    if match is None:
        raise ValueError(
            f"--sizes {text}: '{part}': expected numbers such as 4, 64K, 64M or 4K-64M"
        )
    size = int(match[1]) * _UNITS[match[2]]
    if size <= 0 or size % _FLOAT:
        raise ValueError(
            f"--sizes {text}: {size} bytes are no whole number of float32, which have 4"
        )
    return size


def in_equal_parts(size: int, ranks: int) -> int:
    """The bytes of float32 that give each rank an equal part: `size` rounded down, one at least."""
    return max(size // _FLOAT // ranks, 1) * ranks * _FLOAT


def show_bytes(size: int) -> str:
    """67108864 -> '64 MiB'."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def seconds_unit(seconds: float) -> tuple[float, str]:
    """The unit to show a time in: 0.0041 -> (0.001, 'ms')."""
    return next((found for found in _SECONDS if seconds >= found[0]), _SECONDS[-1])


def show_seconds(seconds: float) -> str:
    """0.0041 -> '4.1 ms'."""
    unit, name = seconds_unit(seconds)
    return f"{seconds / unit:.3g} {name}"
