"""Who am I: the one place that reads rank and world from what a launcher left in the environment.

Pure functions of a mapping; nothing is cached and nothing is written, so thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


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

# launcher -> (rank, size, local rank, local size, cross rank, cross size); "" = the launcher has no
# such variable.
# The order is the order of precedence: what is started inside an mpirun or srun task knows better
# than that task.
_SOURCES: tuple[tuple[str, tuple[str, str, str, str, str, str]], ...] = (
    (
        "perseusrun",
        (
            "PERSEUS_RANK",
            "PERSEUS_SIZE",
            "PERSEUS_LOCAL_RANK",
            "PERSEUS_LOCAL_SIZE",
            "PERSEUS_CROSS_RANK",
            "PERSEUS_CROSS_SIZE",
        ),
    ),
    (
        "perseusrun",
        (
            "HOROVOD_RANK",
            "HOROVOD_SIZE",
            "HOROVOD_LOCAL_RANK",
            "HOROVOD_LOCAL_SIZE",
            "HOROVOD_CROSS_RANK",
            "HOROVOD_CROSS_SIZE",
        ),
    ),
    ("torch", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "", "")),
    (
        "openmpi",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "",
            "",
        ),
    ),
    ("mpich", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "")),
)


def identify(environment: Mapping[str, str] | None = None) -> Identity:
    """This process's identity: from perseusrun, torchrun, Open MPI, MPICH, srun, else a single one.

    Raises ValueError with variable and value if one is not a number or does not fit the others.
    """
    env = os.environ if environment is None else environment
    for launcher, names in _SOURCES:
        given = [name for name in names[:2] if env.get(name)]
        if len(given) < 2:
            # Single variables named RANK are common, but ours have no other purpose.
            if given and launcher == "perseusrun":
                missing = names[1] if given[0] == names[0] else names[0]
                raise ValueError(
                    f"[identity] {given[0]}='{env[given[0]]}' without {missing}: set both"
                )
            continue
        # srun's PMI plugins set PMI_RANK in every task, MPI or not; Hydra's mpirun always adds
        # MPI_LOCALRANKID.
        if launcher == "mpich" and _is_slurm_task(env) and not env.get("MPI_LOCALRANKID"):
            continue
        identity = _from_names(env, launcher, names)
        if launcher == "perseusrun":
            _check_for_torchrun_inside(env, identity, names)
        return identity
    if _is_slurm_task(env):
        return _from_slurm(env)
    return SINGLE


def _from_names(
    env: Mapping[str, str], launcher: str, names: tuple[str, str, str, str, str, str]
) -> Identity:
    size = _number(env, names[1], 1)
    rank = _index(env, names[0], names[1], size)
    local_rank, local_size = _pair(env, names[2], names[3], size)
    cross_rank, cross_size = _pair(env, names[4], names[5], size)
    return Identity(rank, size, local_rank, local_size, cross_rank, cross_size, launcher)


def _check_for_torchrun_inside(
    env: Mapping[str, str], outer: Identity, names: tuple[str, ...]
) -> None:
    """ValueError where torchrun was started by one of perseusrun's ranks, whose variables remain.

    perseusrun takes TORCHELASTIC_RUN_ID from its ranks, so it comes from inside.
    """
    if not all(env.get(name) for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")):
        return
    if (env["RANK"], env["WORLD_SIZE"]) == (str(outer.rank), str(outer.size)):
        return
    rank, size = names[:2]
    raise ValueError(
        f"[identity] {rank}={outer.rank} and {size}={outer.size} belong to an outer job of "
        f"perseusrun, inside of which torchrun has started this process as rank {env['RANK']} of "
        f"{env['WORLD_SIZE']} (RANK, WORLD_SIZE): start the script with perseusrun or with "
        f"torchrun alone, or unset PERSEUS_RANK, PERSEUS_SIZE, HOROVOD_RANK and HOROVOD_SIZE in "
        f"front of torchrun"
    )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun's tasks belong to a step
    # with a count.
    return all(env.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"))


def _from_slurm(env: Mapping[str, str]) -> Identity:
    size = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    rank = _index(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", size)
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    if not all(env.get(name) for name in ("SLURM_LOCALID", "SLURM_NODEID", tasks)):
        return Identity(rank, size, 0, 0, 0, 0, "slurm")
    counts = _tasks_per_node(env, tasks)
    node = _number(env, "SLURM_NODEID", 0)
    local_rank = _number(env, "SLURM_LOCALID", 0)
    if sum(counts) != size or node >= len(counts) or local_rank >= counts[node]:
        raise ValueError(
            f"[identity] {tasks}='{env[tasks]}': expected {size} tasks in all and more than "
            f"{local_rank} on node {node} (SLURM_STEP_NUM_TASKS={size}, "
            f"SLURM_LOCALID={local_rank}, SLURM_NODEID={node})"
        )
    owners = [i for i, count in enumerate(counts) if count > local_rank]
    return Identity(rank, size, local_rank, counts[node], owners.index(node), len(owners), "slurm")


def _tasks_per_node(env: Mapping[str, str], name: str) -> list[int]:
    """'2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in env[name].split(","):
        count, _, repeat = part.strip().partition("(x")
        repeat = repeat.rstrip(")") or "1"
        if not (count.isdecimal() and repeat.isdecimal()):
            raise ValueError(f"[identity] {name}='{env[name]}': expected counts such as 2(x3),1")
        counts += [int(count)] * int(repeat)
    return counts


def _pair(env: Mapping[str, str], index_name: str, size_name: str, limit: int) -> tuple[int, int]:
    """(index, size), or (0, 0) unless both are there: the core then finds out both."""
    if not (index_name and env.get(index_name) and env.get(size_name)):
        return 0, 0
    size = _number(env, size_name, 1)
    if size > limit:
        raise ValueError(
            f"[identity] {size_name}='{env[size_name]}': expected at most the world's {limit} ranks"
        )
    return _index(env, index_name, size_name, size), size


def _index(env: Mapping[str, str], name: str, size_name: str, size: int) -> int:
    value = _number(env, name, 0)
    if value >= size:
        raise ValueError(
            f"[identity] {name}='{env[name]}': expected 0..{size - 1} ({size_name}={size})"
        )
    return value


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    text = env[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"[identity] {name}='{text}': expected a whole number, {least} or more")
    return int(text)
