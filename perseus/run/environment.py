"""The environment of the ranks: the user's, their identity and the flags' settings.

Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from perseus.run.hosts import Slot

_IDENTITY = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# Of the launcher's host or shell only, or of the job around it.
_STAYS_HERE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")
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
    "TORCHELASTIC_RUN_ID",  # where a rank has it, torchrun was started inside of that rank
}


def local_base(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank on the launcher's own host inherits."""
    return {name: value for name, value in environment.items() if name not in _OF_AN_OUTER_JOB}


def remote_base(environment: Mapping[str, str]) -> dict[str, str]:
    """What is added to the login environment of another host."""
    return {
        name: value
        for name, value in local_base(environment).items()
        if not _STAYS_HERE.fullmatch(name)
    }


def of_job(
    address: str, port: int, secret: str, interfaces: list[str], flags: Mapping[str, str]
) -> dict[str, str]:
    """What all ranks get alike. Scripts written for Horovod read its names."""
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
    """The variables that name network interfaces."""
    if not interfaces:
        return {}
    names = ("PERSEUS_GLOO_NETWORK_INTERFACE", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
    return dict.fromkeys(names, ",".join(interfaces))


def of_rank(slot: Slot, size: int) -> dict[str, str]:
    """A rank's identity, under both names."""
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
