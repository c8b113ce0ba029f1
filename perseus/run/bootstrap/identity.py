"""Who am I: rank and world, as the core reads them from what a launcher left in the environment.

Nothing is cached and nothing is written, so thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Identity:
    """A rank's place in its world.

    local_size 0 or cross_size 0 means that the launcher did not say: the core finds out by host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    launcher: str  # "perseusrun", "torch", "openmpi", "mpich", "slurm" or "single"


SINGLE = Identity(0, 1, 0, 1, 0, 1, "single")


def identify(environment: Mapping[str, str] | None = None) -> Identity:
    """This process's identity: from perseusrun, torchrun, Open MPI, MPICH, srun, else a single one.

    environment: variables to read instead of this process's.

    Raises ValueError with variable and value if one is not a number or does not fit the others.
    """
    variables = (
        None
        if environment is None
        else [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    )
    return Identity(*import_module("perseus._core").launched_identity(variables))
