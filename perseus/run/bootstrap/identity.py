"""The identity of this process: its rank and world, which the launcher left in the environment.

The core reads the variables. Nothing is cached and nothing is written, so it is thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from perseus.run.bootstrap.membership import CONTROL_VARIABLE


@dataclass(frozen=True)
class Identity:
    """The position of a rank in its world.

    If local_size or cross_size is 0, the launcher has not set it, and the core derives it from the
    ranks' host names.
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
    """Return this process's identity, as perseusrun, torchrun, Open MPI, MPICH or srun has set it.

    A process that none of them has started is a world of its own.

    environment: variables to read instead of this process's.

    Raises ValueError, which names the variable and its value, if one is not a number or contradicts
    the others, or if a rank of an elastic job has no place in a world yet.
    """
    source = os.environ if environment is None else environment
    if CONTROL_VARIABLE in source and "PERSEUS_RANK" not in source:
        raise ValueError(
            "[launch] this process gets its rank in hvd.init(), since the job is elastic; a script "
            "for torch.distributed needs hvd.elastic for that (docs/elastic.md), torchrun, or "
            "perseusrun without --min-np and --host-discovery-script"
        )
    return Identity(*import_module("perseus._core").launched_identity(as_texts(environment)))


def as_texts(environment: Mapping[str, str] | None) -> list[bytes] | None:
    """Return variables as the core takes them: NAME=VALUE, or None for this process's."""
    if environment is None:
        return None
    return [os.fsencode(f"{name}={value}") for name, value in environment.items()]
