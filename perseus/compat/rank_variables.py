"""Rank and size as launchers tell them: `horovod.runner.common.util.env`. Pure functions.

What perseusrun sets, and of mpirun what Horovod's own tests compare hvd.rank() with.
"""

from __future__ import annotations

import os

_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) of the first launcher whose variables are set; (0, 1) without any.

    RuntimeError when only one variable of a launcher's two is set.
    """
    for names in _LAUNCHERS:
        values = [os.environ[name] for name in names if name in os.environ]
        if len(values) == 2:
            return int(values[0]), int(values[1])
        if values:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {names[0]} and "
                f"{names[1]} found in environment"
            )
    return 0, 1
