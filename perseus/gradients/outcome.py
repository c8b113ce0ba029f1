"""What became of a gradient in the core."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """enum perseus_gradient: what became of a gradient, or of a step's together."""

    REDUCED = 0
    HELD = 1  # part of a sum to come (PERSEUS_ACCUMULATE_N_STEPS)
    SKIPPED = 2  # some rank had a NaN (PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip)
