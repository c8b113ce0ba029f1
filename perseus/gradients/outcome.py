"""The outcome of a gradient's reduction. Immutable."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """The outcome for one gradient or for a whole step; the values of enum perseus_gradient."""

    REDUCED = 0
    HELD = 1  # added to a sum that is not complete yet (PERSEUS_ACCUMULATE_N_STEPS)
    SKIPPED = 2  # a rank had a NaN (PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip)
