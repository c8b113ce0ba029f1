"""Finds the store of a job, that is its host, port and secret, by the means of the job's launcher.

A process does so once, because the store serves all of its worlds. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from perseus.run.bootstrap import mpi_round
from perseus.run.bootstrap.addresses import (
    host_identity,
    is_loopback,
    is_own_address,
    own_address,
)
from perseus.run.bootstrap.announcement import (
    announcement,
    failure_announcement,
    read_announcement,
)
from perseus.run.bootstrap.identity import Identity, as_texts
from perseus.run.bootstrap.start_settings import (
    given_secret,
    gives_secret,
    setting,
    start_timeout,
    whole_number,
)
from perseus.run.bootstrap.torch_round import announce, ask, await_announcement

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 6666
_SLURM_PORTS = 10_000  # the range of ports over which Slurm's jobs on one node are spread
# What a launcher of Open MPI, MPICH or Slurm sets beside variables that tell a rank its place.
_OF_LAUNCHERS = "PMIX_RANK", "PMI_FD", "PMI_PORT"


@dataclass(frozen=True)
class Rendezvous:
    """The address of a job's store, and the secret that proves membership.

    Keep it as long as any rank may initialise again: `held` keeps alive the server that rank 0 may
    run, which other ranks may need for the next world while rank 0 is still leaving this one. A
    world of one rank that perseusrun did not start needs no store; its port is 0.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    held: tuple[Any, ...] = field(default=(), repr=False, compare=False)


def find_store(identity: Identity, environment: Mapping[str, str] | None = None) -> Rendezvous:
    """Return the store of the world. Rank 0 starts it, unless the launcher has done so.

    environment: the variables that gave the identity, for the launcher to be asked as the same
    rank; this process's by default. Addresses and secrets are always this process's.

    Raises ValueError for a wrong or missing setting, TimeoutError if rank 0 does not appear within
    HOROVOD_START_TIMEOUT seconds, and RuntimeError if a package is missing or does not match. Each
    message is one line, with the remedy.
    """
    if identity.launcher == "perseusrun":
        return _from_perseusrun(identity)
    if identity.launcher == "single":
        _refuse_unknown_launcher()
    if identity.size == 1:
        return Rendezvous("", 0, b"")
    launchers: dict[str, Callable[[Identity], Rendezvous]] = {
        "torch": _through_torch,
        "openmpi": partial(_through_mpi, environment=environment),
        "mpich": partial(_through_mpi, environment=environment),
        "slurm": partial(_through_slurm, environment=environment),
    }
    return launchers[identity.launcher](identity)


def _refuse_unknown_launcher() -> None:
    """Raise ValueError if each of several ranks would be a world of one.

    common/bootstrap/bootstrap.cc does the same for programs without Python.
    """
    for name in _OF_LAUNCHERS:
        if value := setting(name):
            raise ValueError(
                f"[rendezvous] {name}={value!r} comes from a launcher whose other variables are "
                "not known: start the job with perseusrun, or with mpirun of Open MPI or MPICH"
            )


def _from_perseusrun(identity: Identity) -> Rendezvous:
    host = setting("PERSEUS_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    names = ("PERSEUS_RENDEZVOUS_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    port = whole_number(*names, default=0, least=0, most=65535)
    # perseusrun's secret takes precedence over a file of the user.
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
    # Ranks that reach rank 0 by any loopback address, ::1 for example, are on its host.
    local = identity.local_size == identity.size or is_loopback(host)
    store_host = _LOOPBACK if local else host
    if find_spec("torch") is None:
        return _at_known_place(identity, store_host, _master_port())
    port = whole_number("MASTER_PORT", default=29500, least=1, most=65535)
    deadline = time.monotonic() + start_timeout()
    place = f"torch's store at MASTER_ADDR:MASTER_PORT {host}:{port}"
    within = f"within {start_timeout()} s (HOROVOD_START_TIMEOUT); does every rank call init()?"
    try:
        store = _torch_store(identity, host, port, deadline)
        if identity.rank == 0:
            return _serve_and_announce(
                lambda: _serve(store_host, keep=(store,)),
                lambda text: announce(store, text, identity.size, deadline, f"{place} {within}"),
            )
        late = f"bring all ranks together at {place} {within}"
        read = _reader(identity, (store,))
        return await_announcement(store, identity.rank, read, deadline, late)
    except import_module("torch.distributed").DistError as error:
        fact = str(error).splitlines()[0]
        raise RuntimeError(f"[rendezvous] {place}: {fact}") from None


def find_store_through(store: Any, rank: int, size: int, timeout: int) -> Rendezvous:
    """Return the store of a process group, whose ranks share one of torch's stores.

    store: torch's, with a prefix for this group. timeout: in seconds.

    Raises TimeoutError, which names the missing ranks, and the errors of find_store().
    """
    deadline = time.monotonic() + timeout
    within = f"within {timeout} s (timeout= of the process group)"
    identity = Identity(rank, size, 0, 0, 0, 0, "torch")
    here = f"{host_identity()} {socket.gethostname()}"
    if rank != 0:
        late = f"bring all ranks together in torch's store {within}"
        read = _reader(identity, ())
        return await_announcement(store, rank, read, deadline, late, tells=here)
    late = f"torch's store {within}"

    def serve() -> Rendezvous:
        # Asked for, because the ranks of an earlier round may have been on other hosts.
        hosts = [here, *ask(store, size, deadline, late)]
        local = len(set(hosts)) == 1  # names count where the identity cannot be read
        return _serve(_LOOPBACK if local else own_address([text.split()[-1] for text in hosts]))

    return _serve_and_announce(serve, lambda text: announce(store, text, size, deadline, late))


def _serve_and_announce(serve: Callable[[], Rendezvous], tell: Callable[[str], None]) -> Rendezvous:
    """Start rank 0's server, and tell the others where it is or why there is none.

    They would otherwise wait for it until their deadline, and blame the wrong thing. Raises what
    `serve` and `tell` raise.
    """
    try:
        rendezvous = serve()
        text = _to_text(rendezvous)
    except Exception as error:
        with contextlib.suppress(Exception):  # the first error is the one to raise
            tell(failure_announcement(error))
        raise
    tell(text)
    return rendezvous


def _torch_store(identity: Identity, host: str, port: int, deadline: float) -> Any:
    """Return torch's TCPStore at MASTER_ADDR:MASTER_PORT, which the script may use as well."""
    master = identity.rank == 0 and setting("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not master:
        _wait_for_master(host, port, deadline)
    # multi_tenant: on rank 0, the script's own init_process_group shares this server.
    return import_module("torch.distributed").TCPStore(
        host,
        port,
        is_master=master,
        timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=master,
    )


def wait_until_listening(host: str, port: int, on_failure: Callable[[OSError], None]) -> None:
    """Wait until a server listens: torch's own connect logs warnings and ignores signals.

    on_failure: is called after each attempt that fails; what it raises ends the wait.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            on_failure(error)
            time.sleep(0.1)


def _wait_for_master(host: str, port: int, deadline: float) -> None:
    def give_up_late(error: OSError) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"[rendezvous] nobody listens at MASTER_ADDR:MASTER_PORT {host}:{port} after "
                f"{start_timeout()} s (HOROVOD_START_TIMEOUT): {error}; is rank 0 running on "
                f"that host?"
            ) from None

    wait_until_listening(host, port, give_up_late)


def _through_mpi(identity: Identity, environment: Mapping[str, str] | None) -> Rendezvous:
    if find_spec("mpi4py") is None:
        return _through_launcher(environment)
    deadline = time.monotonic() + start_timeout()
    mpi_round.join(identity, deadline)
    hosts = mpi_round.gather(socket.gethostname(), deadline)

    def serve() -> Rendezvous:
        local = identity.local_size == identity.size
        return _serve(_LOOPBACK if local else own_address(hosts))

    told = ""
    found: Rendezvous | None = None
    failure: Exception | None = None
    problem = ""

    def tell(text: str) -> None:
        nonlocal told
        told = text

    if identity.rank == 0:
        try:
            found = _serve_and_announce(serve, tell)
        except Exception as error:
            failure = error
    announced = mpi_round.broadcast(told, deadline)
    if identity.rank != 0:
        try:
            found = _reader(identity, ())(announced)
        except ValueError as error:
            problem = str(error)
    problems = [text for text in mpi_round.gather(problem, deadline) if text]
    if failure is not None:
        raise failure
    if found is None or problems:
        raise ValueError(problems[0])
    return found


def _through_launcher(environment: Mapping[str, str] | None) -> Rendezvous:
    """Exchange the store's address through the launcher's key-value space, by PMI or PMIx.

    A process that has done so can no longer initialise MPI.
    """
    return Rendezvous(*import_module("perseus._core").launched_store(as_texts(environment)))


def _through_slurm(identity: Identity, environment: Mapping[str, str] | None) -> Rendezvous:
    nodes = setting("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if identity.local_size == identity.size:
        host = _LOOPBACK
    elif nodes:
        host = first_host(nodes)
    else:
        raise ValueError(
            "[rendezvous] SLURM_STEP_NODELIST is not set: start the ranks with srun or perseusrun"
        )
    if not gives_secret():
        if setting("PMI_FD", "PMIX_RANK") and find_spec("mpi4py") is None:
            return _through_launcher(environment)
        raise ValueError(
            "[rendezvous] ranks started by srun need a shared secret: "
            "export PERSEUS_SECRET=$(openssl rand -hex 16) before srun (or name a file in "
            "PERSEUS_SECRET_FILE); without mpi4py, srun --mpi=pmi2 does as well"
        )
    port = _master_port()
    if not setting("PERSEUS_MASTER_PORT"):
        # No channel exists to publish a port, so every rank derives the same one.
        step = whole_number("SLURM_STEP_ID", default=0, least=0, most=2**32)
        job = whole_number("SLURM_JOB_ID", "SLURM_JOBID", default=0, least=0, most=2**32)
        port += (job * 37 + step * 7) % _SLURM_PORTS
    return _at_known_place(identity, host, port)


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: 'a[01-03,7]-x,b' gives 'a01-x'."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    first = inside.split(",")[0].split("-")[0]
    # A second bracket, as in a[1-2]b[3-4], belongs to the same name.
    return head + first + first_host(tail) if tail and not tail.startswith(",") else head + first


def _at_known_place(identity: Identity, host: str, port: int) -> Rendezvous:
    """Return a store whose port and secret all ranks know, as they have no channel for them."""
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


def _serve(host: str, keep: tuple[Any, ...] = ()) -> Rendezvous:
    """Start rank 0's server, which others reach as `host`; its port may be the next free one."""
    secret = given_secret() or secrets.token_hex(32).encode()
    server = _store_server(_listen_address(host), _master_port(), True, secret)
    return Rendezvous(host, server.port, secret, (server, *keep))


def _store_server(host: str, port: int, next_free: bool, secret: bytes) -> Any:
    return import_module("perseus._core").StoreServer(host, port, next_free, secret)


def _listen_address(host: str) -> str:
    """Return the address to listen on, so that others reach it as `host`; "" means all."""
    if is_loopback(host):
        return _LOOPBACK
    if is_own_address(host):
        address = socket.gethostbyname(host)
        # Some hosts files map a host's own name to loopback, where other hosts do not reach it.
        return "" if is_loopback(address) else address
    return ""


def _master_port() -> int:
    return whole_number("PERSEUS_MASTER_PORT", default=_DEFAULT_PORT, least=1, most=65535)


def _to_text(rendezvous: Rendezvous) -> str:
    return announcement(rendezvous.host, rendezvous.port, rendezvous.secret, gives_secret())


def _reader(identity: Identity, keep: tuple[Any, ...]) -> Callable[[str], Rendezvous]:
    """Return a function that reads announcements, those that an earlier round has left as well."""
    secret = cache(given_secret)  # a pipe can be read once
    return lambda text: Rendezvous(*read_announcement(text, secret(), identity.rank), keep)
