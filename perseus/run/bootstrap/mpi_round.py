"""Announces rank 0's store to the ranks of an mpirun, through the MPI of mpi4py.

The script may use MPI, too, so Perseus has a communicator of its own. MPI_Finalize, which mpi4py
calls at exit, waits for all ranks, so every rank takes part in every exchange, and all fail if one
does. What has begun and been given up belongs to MPI until the process ends. For the main thread.
"""

from __future__ import annotations

import atexit
import sys
import time
from importlib import import_module
from typing import Any, NoReturn

from perseus.run.bootstrap.identity import Identity
from perseus.run.bootstrap.start_settings import start_timeout

_MESSAGE_BYTES = 1024
_LEAVING_SECONDS = 5


class _Round:
    """What this process has with MPI."""

    mpi: Any = None
    ranks: Any = None  # the communicator, once all have made it
    given_up: Any = None  # requests and buffers of what MPI may still receive


def join(identity: Identity, deadline: float) -> None:
    """Make a communicator of all ranks. Ends by `deadline`, in seconds of time.monotonic().

    Raises RuntimeError if mpi4py does not belong to this mpirun, and TimeoutError if a rank is
    late, or was late for an earlier call: MPI cannot take back what it has begun.
    """
    if _Round.given_up is not None:
        raise TimeoutError(
            "[rendezvous] an earlier init() has waited in vain for another rank, and MPI cannot "
            "begin anew: start the job again, with a longer HOROVOD_START_TIMEOUT if ranks are late"
        )
    if _Round.ranks is not None:
        return
    try:
        # The import initialises MPI, and mpi4py finalises it at exit. The script's own import of
        # mpi4py shares both.
        mpi = _Round.mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise RuntimeError(
            f"[rendezvous] mpi4py is installed but does not find its MPI ({why}): install the "
            "mpi4py that belongs to this mpirun, uninstall it, or start with perseusrun"
        ) from None
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
    ranks, request = world.Idup()
    _finish(request, ranks, deadline)
    _Round.ranks = ranks


def gather(text: str, deadline: float) -> list[str]:
    """Return the texts of all ranks; what is longer than a message is cut off."""
    ranks = _Round.ranks
    sent, received = _padded(text), bytearray(_MESSAGE_BYTES * ranks.Get_size())
    _finish(ranks.Iallgather(sent, received), (sent, received), deadline)
    pieces = [received[i : i + _MESSAGE_BYTES] for i in range(0, len(received), _MESSAGE_BYTES)]
    return [_unpadded(piece) for piece in pieces]


def broadcast(text: str, deadline: float) -> str:
    """Return rank 0's text on all ranks."""
    message = bytearray(_padded(text))
    _finish(_Round.ranks.Ibcast(message, root=0), message, deadline)
    return _unpadded(message)


def leave_after_failure() -> None:
    """End the job if an exception ends this process, unless all ranks come here within seconds.

    One that hangs would keep the others in MPI_Finalize, and the job's nodes, for ever. Does
    nothing where MPI has not been used.
    """
    mpi, ranks = _Round.mpi, _Round.ranks
    if getattr(sys, "last_value", None) is None or mpi is None or mpi.Is_finalized():
        return
    if ranks is not None and _Round.given_up is None:
        request = ranks.Ibarrier()
        deadline = time.monotonic() + _LEAVING_SECONDS
        while not request.Test():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            return
    sys.stdout.flush()
    sys.stderr.flush()
    mpi.COMM_WORLD.Abort(1)


def _finish(request: Any, buffers: Any, deadline: float) -> None:
    while not request.Test():
        if time.monotonic() > deadline:
            _give_up(request, buffers)
        time.sleep(0.001)


def _give_up(request: Any, buffers: Any) -> NoReturn:
    _Round.given_up = request, buffers
    atexit.register(leave_after_failure)
    raise TimeoutError(
        f"[rendezvous] some rank did not call init() within {start_timeout()} s "
        f"(HOROVOD_START_TIMEOUT)"
    )


def _padded(text: str) -> bytes:
    return text.encode(errors="replace")[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")


def _unpadded(message: bytearray) -> str:
    # The end may be the half of a character.
    return message.rstrip(b"\0").decode(errors="ignore")
