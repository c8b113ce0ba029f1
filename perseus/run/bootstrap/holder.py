"""The process that is a rank tells the programs which it starts: they inherit the rank's variables.

One of them that joined the world, too, would take the place of the rank, or disturb its start.
Changes this process's environment; not thread-safe.
"""

from __future__ import annotations

import os

from perseus.run.bootstrap.identity import Identity
from perseus.run.bootstrap.start_settings import setting

HOLDER_VARIABLE = "PERSEUS_RANK_HOLDER"
# Of the launchers whose ranks can tell one job from another by its store's address.
_ADDRESS = {
    "perseusrun": (
        ("PERSEUS_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        ("PERSEUS_RENDEZVOUS_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    "torch": (("MASTER_ADDR",), ("MASTER_PORT",)),
}
_REMEDY = {
    "perseusrun": "PERSEUS_RANK, PERSEUS_SIZE, HOROVOD_RANK and HOROVOD_SIZE",
    "torch": "RANK and WORLD_SIZE",
}


def refuse_second(identity: Identity) -> None:
    """Raise ValueError if a process from which this one descends is this rank of this job."""
    process, _, rank = os.environ.get(HOLDER_VARIABLE, "").partition(" ")
    pid = process.partition(".")[0]
    if not pid.isdecimal() or int(pid) == os.getpid() or rank != _rank(identity):
        return
    if process == _process(int(pid)):
        raise ValueError(
            f"[launch] process {pid}, whose variables this one has inherited, is rank "
            f"{identity.rank} of this job already: unset {_REMEDY[identity.launcher]} for a world "
            f"of its own"
        )


def hold(identity: Identity) -> None:
    """This process has joined a world."""
    if rank := _rank(identity):
        os.environ[HOLDER_VARIABLE] = f"{_process(os.getpid())} {rank}"


def release() -> None:
    """This process has left its world. Does nothing in a fork of the one that had joined it."""
    if os.environ.get(HOLDER_VARIABLE, "").startswith(f"{_process(os.getpid())} "):
        del os.environ[HOLDER_VARIABLE]


def _rank(identity: Identity) -> str:
    """Return what tells the rank from those of other jobs; "" if it needs no protection."""
    if identity.size == 1 or identity.launcher not in _ADDRESS:
        return ""
    host, port = (setting(*names) for names in _ADDRESS[identity.launcher])
    return f"{identity.launcher} {identity.rank} {identity.size} {host}:{port}"


def _process(pid: int) -> str:
    """Return what tells a process from later ones with its number; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if state in (b"Z", b"X") else f"{pid}.{fields[18].decode()}"
