"""Builds the environment of the ranks from the user's, the ranks' identity and the flags.

Pure functions, thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from perseus.run.bootstrap.holder import HOLDER_VARIABLE
from perseus.run.bootstrap.membership import CONTROL_VARIABLE
from perseus.run.bootstrap.torch_round import IDENTITY as _OF_TORCH
from perseus.run.hosts import Slot

_IDENTITY = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# These hold for the launcher's host or shell only.
_STAYS_HERE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")
# A launcher that is itself a rank of another job has inherited these from that job.
_OF_AN_OUTER_JOB = {
    f"{prefix}_{name}" for prefix in ("PERSEUS", "HOROVOD") for name in _IDENTITY
} | {
    "PERSEUS_SECRET",
    "PERSEUS_RENDEZVOUS_ADDR",
    "PERSEUS_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_HOSTNAME",
    "_HOROVOD_SECRET_KEY",
    "HOROVOD_ELASTIC",
    CONTROL_VARIABLE,
    HOLDER_VARIABLE,
    # A script that finds torch's variables, which containers set as well, takes them for its own.
    # Where they are removed, they show a torchrun that was started inside of a rank.
    *_OF_TORCH,
    "TORCHELASTIC_RUN_ID",
}


def local_base(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on the launcher's own host inherit."""
    return {name: value for name, value in environment.items() if name not in _OF_AN_OUTER_JOB}


def remote_base(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are added to the login environment on another host."""
    return {
        name: value
        for name, value in local_base(environment).items()
        if not _STAYS_HERE.fullmatch(name)
    }


def of_job(
    address: str, port: int, secret: str, interfaces: list[str], flags: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that are equal on all ranks.

    address, port: where the store listens. The job's facts are there under Horovod's names as well,
    because scripts written for Horovod read them.
    """
    job = {
        "PERSEUS_RENDEZVOUS_ADDR": address,
        "PERSEUS_RENDEZVOUS_PORT": str(port),
        "PERSEUS_SECRET": secret,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    return job | of_interfaces(interfaces) | dict(flags)


def of_interfaces(interfaces: list[str]) -> dict[str, str]:
    """Return the variables that name the network interfaces; {} without any interface."""
    if not interfaces:
        return {}
    names = ",".join(interfaces)
    return {
        "PERSEUS_GLOO_NETWORK_INTERFACE": names,
        "HOROVOD_GLOO_IFACE": names,
        "NCCL_SOCKET_IFNAME": f"={names}",  # without "=", NCCL also takes eth10 for eth1
    }


def of_process(host: str, slot: int) -> dict[str, str]:
    """Return the variables of a process of an elastic job, which gets its identity later.

    Scripts choose their GPU by the local rank, some before init().
    """
    return {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": host, "HOROVOD_LOCAL_RANK": str(slot)}


def of_rank(slot: Slot, size: int) -> dict[str, str]:
    """Return the variables of a rank's identity, with the prefixes PERSEUS_ and HOROVOD_."""
    values = (
        slot.rank,
        size,
        slot.local_rank,
        slot.local_size,
        slot.cross_rank,
        slot.cross_size,
    )
    identity = {
        f"{prefix}_{name}": str(value)
        for prefix in ("PERSEUS", "HOROVOD")
        for name, value in zip(_IDENTITY, values, strict=True)
    }
    return identity | {"HOROVOD_HOSTNAME": slot.host}
