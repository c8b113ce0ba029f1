"""Parses and formats sizes and times. Pure functions, thread-safe."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_STEP = 4  # the factor from one size of a range to the next
_FLOAT = 4
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def parse_sizes(text: str) -> list[int]:
    """Parse a list of sizes in bytes, such as '4,64K,64M' or '4K-64M', a range in steps of four.

    K, M and G mean KiB, MiB and GiB. Raises ValueError for anything else, and for sizes that are
    not multiples of 4, the size of a float32.
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
    """Round a size in bytes down so that each rank gets equally many float32, at least one."""
    return max(size // _FLOAT // ranks, 1) * ranks * _FLOAT


def show_bytes(size: int) -> str:
    """Format a size in bytes: 67108864 gives '64 MiB'."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def seconds_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a time: 0.0041 gives (0.001, 'ms')."""
    return next((found for found in _SECONDS if seconds >= found[0]), _SECONDS[-1])


def show_seconds(seconds: float) -> str:
    """Format a time: 0.0041 gives '4.1 ms'."""
    unit, name = seconds_unit(seconds)
    return f"{seconds / unit:.3g} {name}"
