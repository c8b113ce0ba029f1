"""Gives a script that mpirun, srun or perseusrun has started the variables of torch's launcher.

Belongs to the main thread.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from perseus import _core, basics, config, control, ddp, ddp_numbers
from perseus.errors import HorovodInternalError, InitializationError
from perseus.run.bootstrap.addresses import host_identity, own_address
from perseus.run.bootstrap.identity import identify
from perseus.run.bootstrap.rendezvous import wait_until_listening
from perseus.run.bootstrap.torch_round import IDENTITY as _OF_TORCH
from perseus.torch.session import ALLGATHER, describe, wrap

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_TEXT_BYTES = 256
_filled: list[bool] = []  # once the environment is ours, for the life of the process
_held: list[c10d.Store] = []  # rank 0's server, which torch's own store at this port shares


def init_perseus_training() -> None:
    """Prepare a script for init_process_group() without torch's launcher, and for Perseus.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where torch's
    launcher has not, from what mpirun, srun or perseusrun says; a process that none of them has
    started is a world of its own. Process groups that ask for gloo or nccl then get the backend
    "perseus". Every rank calls this before init_process_group().

    Raises InitializationError, which names the missing ranks or the variable that is wrong.
    """
    ddp.redirect_always()
    fill_environment()


def fill_environment() -> None:
    """Set torch's variables, unless its launcher has. Every rank calls it. See above for errors.

    PERSEUS_USE_DDP_LAUNCHER=0 takes the rank and the size from mpirun, srun or perseusrun even
    where torch's variables are set.
    """
    if is_in_elastic_job():
        _fill_for_world()
        return
    _settle_numbers()
    counts = config.yes_or_no("PERSEUS_USE_DDP_LAUNCHER", True)
    if _filled or ("RANK" in os.environ and counts):
        return
    environment = {k: v for k, v in os.environ.items() if k not in _OF_TORCH}
    context = basics.launched_context("torch.distributed", environment)
    try:
        if not all(name in os.environ for name in _MASTER):
            operations = _core.Operations(context, wrap, describe)
            try:
                host, port = _meet(context.rank, partial(_exchange, operations))
            finally:
                operations.close()
            os.environ.update(zip(_MASTER, (host, port), strict=True))
        own = (context.rank, context.size, context.local_rank, context.local_size)
        os.environ.update(zip(_OF_TORCH, map(str, own), strict=True))
        os.environ.setdefault(ddp_numbers.HOST, str(context.cross_rank))
        _filled.append(True)
    finally:
        context.shutdown()
        context.close()


def _settle_numbers() -> None:
    """Keep what the script has been shown, if it says itself where rank 0 is: no rank has to meet.

    Else take it back, so that a meeting sets all of torch's variables.
    """
    if all(name in os.environ for name in _MASTER) and ddp_numbers.leave():
        _filled.append(True)
    ddp_numbers.hide()


# ---- in elastic jobs of perseusrun ----


class _World:
    """What has been set for the present world of an elastic job."""

    variables: ClassVar[dict[str, str]] = {}
    excepthook: Any = None  # before torch put its own in front


def is_in_elastic_job() -> bool:
    """Whether perseusrun gives this process its numbers in every world."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun inside a rank
        return False
    member = basics.membership()
    return member is not None and member.is_of_this_process()


def lacks_what_a_launcher_knows() -> bool:
    """Whether mpirun, srun or perseusrun has started this process, which torch cannot read."""
    return "RANK" not in os.environ and identify().launcher not in ("single", "torch")


def fill_for_who_looks_early() -> bool:
    """Set torch's variables for a library that reads them before it makes a process group.

    Without them it would train in every rank as if that were alone. Every rank calls it; a world of
    one rank needs none. Returns whether the variables are from here.
    """
    _settle_numbers()
    if is_in_elastic_job() or (lacks_what_a_launcher_knows() and identify().size > 1):
        fill_environment()
    return bool(_filled or _World.variables)


def raise_if_ended() -> None:
    """In an elastic job, raise HorovodInternalError once a rank has ended the present world.

    It may have died after the last collective of the world, and before it was in a group.
    """
    reason = basics.world_failure() if is_in_elastic_job() else None
    if reason is not None:
        raise HorovodInternalError(reason)


def is_free_to_fill() -> bool:
    """Whether the script has not set torch's variables itself."""
    return os.environ.get("RANK") == _World.variables.get("RANK")


def is_filled_for_world() -> bool:
    """Whether torch's variables are those of the present world."""
    return bool(_World.variables) and is_free_to_fill()


def rendezvous(
    timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[c10d.Store, int, int]]:
    """Yield what torch's handler of env:// yields, whose rank 0 waits even for dead ranks."""
    values = _World.variables
    rank, size = int(values["RANK"]), int(values["WORLD_SIZE"])
    if _held:
        yield _held[0], rank, size
        return
    host, port = values["MASTER_ADDR"], int(values["MASTER_PORT"])
    deadline = time.monotonic() + timeout.total_seconds()

    def give_up(error: OSError) -> None:
        raise_if_ended()  # rank 0 may have died
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"[torch] no connection to rank 0's store at {host}:{port} within {timeout} "
                f"(timeout= of the process group): {error}"
            ) from None

    wait_until_listening(host, port, give_up)
    store = c10d.TCPStore(host, port, size, False, timeout=timeout, wait_for_workers=False)
    yield store, rank, size


def _fill_for_world() -> None:
    """Set torch's variables anew in each world. A collective of the world's ranks."""
    if not basics.is_initialized():
        raise InitializationError(
            "[torch] a rank of an elastic job gets its number in hvd.init(), which must come "
            "before init_process_group() (docs/elastic.md); a script without hvd.elastic needs "
            "torchrun, or perseusrun without --min-np and --host-discovery-script"
        )
    if _World.variables:
        return
    host, port = _meet(
        basics.rank(), lambda line: control.gather_lines(line, "perseus.torch.distributed")
    )
    own = (basics.rank(), basics.size(), basics.local_rank(), basics.local_size())
    _World.variables = dict(zip((*_MASTER, *_OF_TORCH), (host, port, *map(str, own)), strict=True))
    _World.variables[ddp_numbers.HOST] = str(basics.cross_rank())
    _World.excepthook = sys.excepthook
    os.environ.update(_World.variables)


def forget_world() -> None:
    """Remove what was set for a world of an elastic job, which has ended."""
    if not _World.variables:
        return
    for name, value in _World.variables.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    if getattr(sys.excepthook, "__module__", "").startswith("torch."):
        sys.excepthook = _World.excepthook
    _World.variables = {}
    _held.clear()


def _meet(rank: int, exchange: Callable[[str], list[str]]) -> tuple[str, str]:
    """Start torch's store on rank 0; return its address and port, on all ranks.

    exchange: returns the texts of all ranks.
    """
    hosts = exchange(f"{host_identity()} {socket.gethostname()}")
    text = ""
    if rank == 0:
        local = len(set(hosts)) == 1
        host = "127.0.0.1" if local else own_address([text.split()[-1] for text in hosts])
        store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        _held.append(store)
        text = f"{host} {store.port}"
    host, _, port = exchange(text)[0].partition(" ")
    return host, port


def _exchange(operations: _core.Operations, text: str) -> list[str]:
    """Return the texts of all ranks."""
    padded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    given = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    received = operations.synchronize(operations.submit(ALLGATHER, "address", given))
    return [bytes(row.tolist()).decode().rstrip() for row in received.view(-1, _TEXT_BYTES)]
