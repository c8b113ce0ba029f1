"""How the ranks of a job find their store: host, port and secret, through whatever launched them.

A process looks for the store once: it serves every world of the process. Not meant for several
threads at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from perseus.run.bootstrap.addresses import (
    interface_address,
    is_loopback,
    is_own_address,
    named_interface,
    source_address,
)
from perseus.run.bootstrap.announcement import announcement, read_announcement
from perseus.run.bootstrap.identity import Identity
from perseus.run.bootstrap.start_settings import given_secret, setting, start_timeout, whole_number
from perseus.run.bootstrap.torch_round import announce, await_announcement

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 6666
_SLURM_PORTS = 10_000  # jobs that share a node get ports of their own out of this many
_MESSAGE_BYTES = 1024


@dataclass(frozen=True)
class Rendezvous:
    """Where this job's store listens, and what proves membership.

    Hold it as long as any rank may start again: `held` keeps alive the server that rank 0 may run,
    where others may be before rank 0 itself has left the last world.
    A world of one rank that perseusrun did not start has port 0: it needs no store.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    held: tuple[Any, ...] = field(default=(), repr=False, compare=False)


def meet(identity: Identity) -> Rendezvous:
    """Agree with all ranks of the world on one store; rank 0 starts it unless the launcher did.

    Raises ValueError for a setting that is wrong or missing, TimeoutError when rank 0 stays away
    for HOROVOD_START_TIMEOUT, RuntimeError where a package is missing. One line each, with the
    remedy.
    """
    if identity.launcher == "perseusrun":
        return _from_perseusrun(identity)
    if identity.size == 1:
        return Rendezvous("", 0, b"")
    launchers: dict[str, Callable[[Identity], Rendezvous]] = {
        "torch": _through_torch,
        "openmpi": _through_mpi,
        "mpich": _through_mpi,
        "slurm": _through_slurm,
    }
    return launchers[identity.launcher](identity)


def _from_perseusrun(identity: Identity) -> Rendezvous:
    host = setting("PERSEUS_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    names = ("PERSEUS_RENDEZVOUS_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    port = whole_number(*names, default=0, least=0, most=65535)
    # perseusrun's own secret counts, even where the user also has a file with one.
    secret = os.fsencode(setting("PERSEUS_SECRET")) or given_secret()
    if host and port and secret:
        return Rendezvous(host, port, secret)
    if identity.size == 1:
        return Rendezvous("", 0, b"")
    missing = "PERSEUS_SECRET" if host and port else "PERSEUS_RENDEZVOUS_ADDR and _PORT"
    raise ValueError(
        f"[rendezvous] {missing} not set for rank {identity.rank} of {identity.size}: start the "
        f"ranks with perseusrun"
    )


def _through_torch(identity: Identity) -> Rendezvous:
    host = setting("MASTER_ADDR")
    if not host:
        raise ValueError(
            "[rendezvous] RANK and WORLD_SIZE are set but MASTER_ADDR is not: "
            "give rank 0's host and a free port in MASTER_ADDR and MASTER_PORT"
        )
    local = identity.local_size == identity.size
    if find_spec("torch") is None:
        return _at_known_place(identity, _LOOPBACK if local else host, _master_port())
    port = whole_number("MASTER_PORT", default=29500, least=1, most=65535)
    deadline = time.monotonic() + start_timeout()
    place = f"torch's store at MASTER_ADDR:MASTER_PORT {host}:{port}"
    within = f"within {start_timeout()} s (HOROVOD_START_TIMEOUT); does every rank call init()?"
    try:
        store = _torch_store(identity, host, port, deadline)
        if identity.rank == 0:
            rendezvous = _serve(_LOOPBACK if local else host, local, keep=(store,))
            late = f"{place} {within}"
            announce(store, _to_text(rendezvous), identity.size, deadline, late)
            return rendezvous
        late = f"bring all ranks together at {place} {within}"
        return await_announcement(
            store, identity.rank, lambda text: _from_text(text, identity, (store,)), deadline, late
        )
    except import_module("torch.distributed").DistError as error:
        fact = str(error).splitlines()[0]
        raise RuntimeError(f"[rendezvous] {place}: {fact}") from None


def _torch_store(identity: Identity, host: str, port: int, deadline: float) -> Any:
    """torch's key-value store at MASTER_ADDR:MASTER_PORT, which the script's own use shares."""
    master = identity.rank == 0 and setting("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not master:
        _wait_until_listening(host, port, deadline)
    # multi_tenant: in rank 0 a later (or an earlier) init_process_group shares this server.
    return import_module("torch.distributed").TCPStore(
        host,
        port,
        is_master=master,
        timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=master,
    )


def _wait_until_listening(host: str, port: int, deadline: float) -> None:
    """Knock until somebody answers: torch's own connect is noisy and cannot be interrupted."""
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"[rendezvous] nobody listens at MASTER_ADDR:MASTER_PORT {host}:{port} after "
                    f"{start_timeout()} s (HOROVOD_START_TIMEOUT): {error}; is rank 0 running on "
                    f"that host?"
                ) from None
            time.sleep(0.1)


def _through_mpi(identity: Identity) -> Rendezvous:
    if find_spec("mpi4py") is None:
        return _through_launcher()
    # Importing it initialises MPI and leaves the end of it to mpi4py's exit hook: the script's own
    # import shares both.
    mpi = import_module("mpi4py.MPI")
    if not mpi.Is_initialized():
        mpi.Init_thread()
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (identity.rank, identity.size):
        library = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
        raise RuntimeError(
            f"[rendezvous] mpirun started {identity.size} ranks, but mpi4py sees "
            f"{world.Get_size()}: it runs on '{library}', not on this mpirun's library; pip "
            f"install an mpi4py for it, or start with perseusrun"
        )
    deadline = time.monotonic() + start_timeout()
    local = identity.local_size == identity.size
    hosts = bytearray(_MESSAGE_BYTES * identity.size)
    name = socket.gethostname().encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    _finish(world.Iallgather(name, hosts), deadline)
    message = bytearray(_MESSAGE_BYTES)
    held: tuple[Any, ...] = ()
    if identity.rank == 0:
        names = [
            hosts[i : i + _MESSAGE_BYTES].rstrip(b"\0").decode()
            for i in range(0, len(hosts), _MESSAGE_BYTES)
        ]
        rendezvous = _serve(_LOOPBACK if local else _own_address(names), local)
        held = rendezvous.held
        message[:] = _to_text(rendezvous).encode().ljust(_MESSAGE_BYTES)
    _finish(world.Ibcast(message, root=0), deadline)
    found, complaint = None, b""
    try:
        found = _from_text(message, identity, held)
    except ValueError as error:
        complaint = str(error).encode()[:_MESSAGE_BYTES]
    # MPI ends a process only with the others, so that one rank's error has to be everybody's.
    complaints = bytearray(_MESSAGE_BYTES * identity.size)
    _finish(world.Iallgather(complaint.ljust(_MESSAGE_BYTES, b"\0"), complaints), deadline)
    if found is None or complaints.strip(b"\0"):
        raise ValueError(bytes(complaints).strip(b"\0").split(b"\0")[0].decode())
    return found


def _through_launcher() -> Rendezvous:
    """By the few words that mpirun and srun keep for their processes, PMI or PMIx.

    A process that has used them can no longer initialise MPI.
    """
    return Rendezvous(*import_module("perseus._core").launched_store())


def _finish(request: Any, deadline: float) -> None:
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"[rendezvous] some rank did not call init() within {start_timeout()} s "
                f"(HOROVOD_START_TIMEOUT)"
            )
        time.sleep(0.001)


def _own_address(hosts: list[str]) -> str:
    """This host's address as the others reach it: the interface's, else of the route to one."""
    if interface := named_interface():
        return interface_address(interface)
    here = socket.gethostname()
    others = [host for host in hosts if host != here]
    for host in [*others[:1], here]:
        address = source_address(host)
        if address is not None and not (others and is_loopback(address)):
            return address
    return here


def _through_slurm(identity: Identity) -> Rendezvous:
    nodes = setting("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if identity.local_size == identity.size:
        host = _LOOPBACK
    elif nodes:
        host = first_host(nodes)
    else:
        raise ValueError(
            "[rendezvous] SLURM_STEP_NODELIST is not set: start the ranks with srun or perseusrun"
        )
    if given_secret() is None:
        if setting("PMI_FD", "PMIX_RANK") and find_spec("mpi4py") is None:
            return _through_launcher()
        raise ValueError(
            "[rendezvous] ranks started by srun need a shared secret: "
            "export PERSEUS_SECRET=$(openssl rand -hex 16) before srun (or name a file in "
            "PERSEUS_SECRET_FILE); without mpi4py, srun --mpi=pmi2 does as well"
        )
    port = _master_port()
    if not setting("PERSEUS_MASTER_PORT"):
        # Nothing to publish a port through: every rank derives the same one.
        step = whole_number("SLURM_STEP_ID", default=0, least=0, most=2**32)
        job = whole_number("SLURM_JOB_ID", "SLURM_JOBID", default=0, least=0, most=2**32)
        port += (job * 37 + step * 7) % _SLURM_PORTS
    return _at_known_place(identity, host, port)


def first_host(nodelist: str) -> str:
    """'a[01-03,7]-x,b' -> 'a01-x': the first of the hosts that Slurm's compressed list names."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    first = inside.split(",")[0].split("-")[0]
    # A further bracket (a[1-2]b[3-4]) belongs to the same name.
    return head + first + first_host(tail) if tail and not tail.startswith(",") else head + first


def _at_known_place(identity: Identity, host: str, port: int) -> Rendezvous:
    """Where ranks cannot tell each other anything: port and secret are known beforehand."""
    secret = given_secret()
    if secret is None:
        raise ValueError(
            "[rendezvous] without PyTorch, the ranks need a shared secret: "
            "name a file in PERSEUS_SECRET_FILE (openssl rand -hex 16 > FILE; chmod 600 FILE), or "
            "start with perseusrun"
        )
    if identity.rank != 0:
        return Rendezvous(host, port, secret)
    server = _store_server(_listen_address(host), port, False, secret)
    return Rendezvous(host, port, secret, (server,))


def _serve(host: str, local: bool, keep: tuple[Any, ...] = ()) -> Rendezvous:
    """Rank 0's server, reachable as `host`; the next free port when the first is taken."""
    secret = given_secret() or secrets.token_hex(32).encode()
    server = _store_server(
        _LOOPBACK if local else _listen_address(host), _master_port(), True, secret
    )
    return Rendezvous(host, server.port, secret, (server, *keep))


def _store_server(host: str, port: int, next_free: bool, secret: bytes) -> Any:
    return import_module("perseus._core").StoreServer(host, port, next_free, secret)


def _listen_address(host: str) -> str:
    """The address at which others reach this process as `host`; "" (all) if unknown."""
    if is_loopback(host):
        return _LOOPBACK
    if is_own_address(host):
        address = socket.gethostbyname(host)
        # Many a hosts file gives a host's own name a loopback address, which the others do not see.
        return "" if is_loopback(address) else address
    return ""


def _master_port() -> int:
    return whole_number("PERSEUS_MASTER_PORT", default=_DEFAULT_PORT, least=1, most=65535)


def _to_text(rendezvous: Rendezvous) -> str:
    given = given_secret() is not None
    return announcement(rendezvous.host, rendezvous.port, rendezvous.secret, given)


def _from_text(
    text: str | bytes | bytearray, identity: Identity, keep: tuple[Any, ...]
) -> Rendezvous:
    return Rendezvous(*read_announcement(text, given_secret(), identity.rank), keep)
