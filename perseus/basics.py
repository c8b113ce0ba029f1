"""This process's membership in its world: init, shutdown, rank and size. Shared by all frameworks.

Holds the one default context of the process. init and shutdown belong to one thread; the rest may
be called from any.
"""

from __future__ import annotations

import atexit
import hmac
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from perseus import ddp
from perseus.errors import NOT_INITIALIZED, HorovodInternalError, InitializationError, MismatchError
from perseus.inspection import show_threads

if TYPE_CHECKING:
    from perseus import _core
    from perseus.run.bootstrap.identity import Identity
    from perseus.run.bootstrap.membership import Membership
    from perseus.run.bootstrap.rendezvous import Rendezvous
    from perseus.run.bootstrap.words import Place


# How long a rank that ends because of another one waits, unless its launcher ends it.
_FIRST_TO_FAIL_SECONDS = 1.0
_PAUSE_SECONDS = 0.5  # before a rank tries again what it has failed to do
_GIVEN_UP = "given up this start"  # in errors that tell of another rank's (common/api/context.cc)
_log = logging.getLogger(__name__)

ddp.keep_out()


class _User(Protocol):
    """A user of the running context."""

    def close(self) -> None:
        """Release the context: the world has ended, and the context is freed after this returns."""


@dataclass
class _World:
    context: _core.Context | None = None
    met: tuple[Identity, Rendezvous] | None = None
    epoch: int = 0
    rank: int = 0
    size: int = 1
    users: list[_User] = field(default_factory=list)
    init_hooks: list[Callable[[], None]] = field(default_factory=list)
    begin_hooks: list[Callable[[], None]] = field(default_factory=list)
    end_hooks: list[Callable[[], None]] = field(default_factory=list)
    reset_hooks: list[Callable[[], None]] = field(default_factory=list)
    flush_hooks: list[Callable[[], None]] = field(default_factory=list)
    exit_registered: bool = False


_world = _World()
_gradient_numbers = count(1)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world that the launcher describes; without a launcher, a world of one rank.

    comm: None, [] or the list of all ranks. ValueError for anything else.
    process_sets: ProcessSets to register, the same on all ranks, with ids 1, 2, … in their order;
        "dynamic" allows add_process_set later, as HOROVOD_DYNAMIC_PROCESS_SETS=1 does.
    A second call while running does nothing.

    Raises InitializationError (both a ValueError and a HorovodInternalError) when ranks are
    missing, a variable is wrong, the network cannot be used, or process sets are not the same
    everywhere; the message says which.
    """
    if _world.context is not None:
        return
    try:
        _start(comm, process_sets)
    except (ValueError, RuntimeError, TimeoutError, OSError) as error:
        # The cause says the same, and would only repeat it.
        raise InitializationError(f"Horovod initialization failed: {error}") from None


def _start(comm: Any, process_sets: Any) -> None:
    """Join the next world, or in an elastic job the first one that begins.

    Until one does, perseusrun lets those ranks go that cannot start.
    """
    from perseus.run.bootstrap import holder
    from perseus.run.bootstrap.identity import identify

    member = membership()
    while True:
        if member is not None:
            _world.epoch = _place_of(member).epoch
        identity = identify()
        _check_comm(comm, identity.size)
        holder.refuse_second(identity)
        rendezvous = _rendezvous(identity)
        # Only attempts that the others see count.
        epoch = _world.epoch
        _world.epoch += 1
        try:
            _enter(_connect(identity, rendezvous, "world", epoch), process_sets)
            holder.hold(identity)
            if member is not None:
                member.tell_begun()
            return
        except (ValueError, RuntimeError, TimeoutError, OSError) as error:
            # What is wrong with a rank's settings is so from its first world on: only new ranks
            # end because of it.
            if member is None or (isinstance(error, ValueError) and not member.has_begun):
                raise
            _log.warning("[elastic] world %d did not begin: %s", epoch, error)
            # One that has waited in vain is not the one that is late.
            by_others = _GIVEN_UP in str(error) or isinstance(error, TimeoutError)
            member.is_at_fault = not by_others
            if member.is_at_fault:
                time.sleep(_PAUSE_SECONDS)


def _place_of(member: Membership) -> Place:
    """Wait for a place in the next world of an elastic job; a new rank is fed meanwhile."""
    from perseus import feeding

    feeds = feeding.attach(member)
    place = member.join()
    feeds.stop()
    return place


def _enter(context: _core.Context, process_sets: Any) -> None:
    """Make the context this process's world, with the sets that init() is given."""
    from perseus.process_sets import register_at_init

    _world.context = context
    _world.rank, _world.size = context.rank, context.size
    if not _world.exit_registered:
        atexit.register(_at_exit)
        _world.exit_registered = True
    try:
        for hook in _world.init_hooks:
            hook()
        register_at_init(process_sets)
        for hook in _world.begin_hooks:
            hook()
    except Exception:
        shutdown()
        raise


def membership() -> Membership | None:
    """Return this process's membership in an elastic job of perseusrun; None in any other job."""
    from perseus.run.bootstrap.membership import membership

    return membership()


def launched_context(job: str, environment: Mapping[str, str]) -> _core.Context:
    """Connect all ranks of the launcher apart from init()'s world; the caller closes the context.

    job: its name, which differs from that of every other context of these ranks. environment: the
    variables that tell the rank and the size.

    Raises InitializationError, as init() does.
    """
    from perseus.run.bootstrap.identity import identify

    try:
        identity = identify(environment)
        return _connect(identity, _rendezvous(identity, environment), job, 0)
    except (ValueError, RuntimeError, TimeoutError, OSError) as error:
        raise InitializationError(f"[launch] no rendezvous of the ranks: {error}") from None


def _connect(identity: Identity, rendezvous: Rendezvous, job: str, epoch: int) -> _core.Context:
    from perseus import _core

    context = _core.Context(
        rank=identity.rank,
        size=identity.size,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        cross_rank=identity.cross_rank,
        cross_size=identity.cross_size,
        store_host=rendezvous.host if rendezvous.port else "",
        store_port=rendezvous.port,
        secret=rendezvous.secret,
        job=job,
        epoch=epoch,
    )
    show_threads()
    return context


def _rendezvous(identity: Identity, environment: Mapping[str, str] | None = None) -> Rendezvous:
    """The store of the job. It is found once: rank 0's server outlives its worlds, for ranks that
    start again before rank 0. perseusrun's store is in the environment, which may change.
    """
    from perseus.run.bootstrap.rendezvous import find_store

    if _world.met is None:
        atexit.register(_forget_rendezvous)
    if _world.met is None or _world.met[0] != identity or identity.launcher == "perseusrun":
        _world.met = (identity, find_store(identity, environment))
    return _world.met[1]


def _forget_rendezvous() -> None:
    _world.met = None  # servers have threads, which must end before the interpreter


def _check_comm(comm: Any, size: int) -> None:
    if comm is None or (isinstance(comm, Sequence) and list(comm) in ([], list(range(size)))):
        return
    raise ValueError(
        f"[init] comm={comm!r}: expected None or the list of all ranks; call init() without it, "
        "and use process sets for subsets of ranks (docs/migration.md)"
    )


def shutdown() -> None:
    """Leave the world, which ends it on every rank: pending and later operations there fail.

    Handles that are still open keep their outcome for synchronize. Does nothing when not running.
    """
    from perseus.run.bootstrap import holder

    context, _world.context = _world.context, None
    if context is None:
        return
    holder.release()
    try:
        context.shutdown()
        for user in _world.users:
            user.close()
    finally:
        context.close()
        _world.users.clear()


def abort(reason: str = "no reason given") -> None:
    """End the world on every rank at once, because something is wrong here.

    Operations under way, and all later ones, raise HorovodInternalError on every rank, this one
    included, with the rank that called and its reason. In elastic training, all ranks go back to
    the last commit, so call it where a rank cannot go on with the present state. Any thread may
    call it. ValueError before init().
    """
    _context().abort(str(reason).encode("utf-8", "replace"))
    for hook in _world.end_hooks:
        hook()


def end_world() -> None:
    """End the world on every rank, as shutdown() does, but keep rank and size until shutdown().

    Everything in flight ends at once, here and elsewhere. Does nothing when not running.
    """
    for hook in _world.end_hooks:
        hook()
    if _world.context is not None:
        _world.context.shutdown()


def _at_exit() -> None:
    """Leave the world; if another rank's end is the cause, let the launcher see that one first.

    The rank that began ends its connections before its process, so that the others could be faster:
    launchers would name one of them as the first to fail, and end the one that has more to say.
    TensorFlow and MXNet have exceptions of their own for it.
    """
    from perseus import _core
    from perseus.run.bootstrap.mpi_round import leave_after_failure

    ended = world_failure() is not None
    shutdown()
    reason = getattr(sys, "last_value", None)
    follows = isinstance(reason, HorovodInternalError) or (ended and reason is not None)
    if follows and not isinstance(reason, MismatchError):
        time.sleep(_FIRST_TO_FAIL_SECONDS)
    if reason is not None:
        _core.leave_after_failure()
    leave_after_failure()


def at_init(hook: Callable[[], None]) -> None:
    """Call `hook` in every init(), which may still fail, and at once if init() is already done."""
    _world.init_hooks.append(hook)
    if _world.context is not None:
        hook()


def at_begin(hook: Callable[[], None]) -> None:
    """at_init() for what a start that fails must not do: `hook` runs once all ranks are there.

    The process sets that init() is given are registered by then.
    """
    _world.begin_hooks.append(hook)
    if _world.context is not None:
        hook()


def at_end(hook: Callable[[], None]) -> None:
    """Call `hook` in end_world() and abort(), on any thread, to end what runs beside the world."""
    _world.end_hooks.append(hook)


def at_reset(hook: Callable[[], None]) -> None:
    """Call `hook` when the world has ended here, before this process leaves it for the next one.

    Nothing is under way any more, and what the core holds can still be read.
    """
    _world.reset_hooks.append(hook)


def shutdown_for_next() -> None:
    """shutdown() in a process that will init() again and continue with its state."""
    if _world.context is not None:
        _world.context.shutdown()
        for hook in _world.reset_hooks:
            hook()
    shutdown()


def operations(
    wrap: Callable[..., Any], describe: Callable[[Any], tuple[Any, ...]] | None
) -> _core.Operations | None:
    """A table of handles on the running context for one framework; None when not initialised."""
    if _world.context is None:
        return None
    from perseus import _core

    # A handle of an earlier world must not name an operation of this one.
    made = _core.Operations(_world.context, wrap, describe, (_world.epoch - 1) << 32)
    _world.users.append(made)
    return made


def lend_context(user: _User) -> int:
    """The address of the running perseus_context, for a native library; see _User for how long."""
    address = _context().address
    _world.users.append(user)
    return address


def _context() -> _core.Context:
    if _world.context is None:
        raise ValueError(NOT_INITIALIZED)
    return _world.context


def is_initialized() -> bool:
    """Whether init() was called and shutdown() was not."""
    return _world.context is not None


def world_failure() -> str | None:
    """The reason why the world has ended; None while it runs, or if there is no world."""
    return None if _world.context is None else _world.context.failure()


def rank() -> int:
    """This process's number, 0 … size - 1. ValueError before init(), like all of these."""
    _context()
    return _world.rank


def size() -> int:
    """The number of ranks in the world."""
    _context()
    return _world.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _context().local_rank


def local_size() -> int:
    """The number of ranks on its host."""
    return _context().local_size


def cross_rank() -> int:
    """The index of this host among the hosts that have this local rank."""
    return _context().cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank."""
    return _context().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return _context().is_homogeneous


def group_ranks(group: int) -> list[int] | None:
    """The global ranks of a group, in its order; None for an unknown one."""
    return _context().group_ranks(group)


def derived_key(purpose: bytes) -> bytes:
    """32 bytes that follow from the job's secret, so that only the ranks of the job know them."""
    secret = _world.met[1].secret if _world.met is not None else b""
    return hmac.digest(secret, purpose, "sha256")


def setting(name: str) -> int:
    """The value that the core uses for a variable: a number, 0 or 1, or the index of a choice."""
    return _context().setting(name)


def transport(peer: int) -> str:
    """How data travel to another rank: "shm" or "tcp"."""
    return _context().transport(peer)


def stacks_gathered() -> bool:
    """Whether allgather gives its result a dimension of ranks, by PERSEUS_CHANGE_HVD_ALLGATHER."""
    return _world.context is not None and setting("PERSEUS_CHANGE_HVD_ALLGATHER") == 1


def new_gradients() -> int:
    """A number under which the core keeps the sums of one optimizer's gradients; never 0."""
    return next(_gradient_numbers)


def settings_act_on_gradients() -> bool:
    """Whether settings make the core do something with gradients even in a world of one rank."""
    return setting("PERSEUS_ACCUMULATE_N_STEPS") > 1 or setting("PERSEUS_ALLREDUCE_NANCHECK") > 0


def skips_nan_gradients() -> bool:
    """Whether settings skip steps in which a gradient has a NaN."""
    skips = setting("PERSEUS_ALLREDUCE_NANCHECK_ACTION") == 2
    return skips and setting("PERSEUS_ALLREDUCE_NANCHECK") > 0


def may_withhold_gradients() -> bool:
    """Whether settings let the core keep gradients of a step from being applied."""
    return setting("PERSEUS_ACCUMULATE_N_STEPS") > 1 or skips_nan_gradients()


def forget_gradients(gradient_of: int) -> None:
    """Drop all that the core keeps for one optimizer; does nothing without a world.

    Its sums over steps, residuals and momenta are gone, and its steps count from the start again.
    """
    if _world.context is not None:
        _world.context.forget_gradients(gradient_of)


def forget_sums(gradient_of: int) -> None:
    """Drop the core's sums over steps for one optimizer; does nothing without a world."""
    if _world.context is not None:
        _world.context.forget_sums(gradient_of)


def forget_momenta(gradient_of: int) -> None:
    """Have momentum correction begin anew, because an optimizer has not applied a step.

    Does nothing without a world.
    """
    if _world.context is not None:
        _world.context.forget_momenta(gradient_of)


def read_residual(
    gradient_of: int, group: int, name: str, grouped: bool
) -> tuple[int, bytearray] | None:
    """This rank's residual of an allreduce: (layout, 2 n float32 numbers); None without one."""
    return _context().read_residual(gradient_of, group, name, grouped)


def write_residual(
    gradient_of: int, group: int, name: str, grouped: bool, held: tuple[int, Any]
) -> None:
    """Replace the residual by this layout and these numbers, as read_residual() returned them."""
    _context().write_residual(gradient_of, group, name, grouped, *held)


def flush_residuals() -> None:
    """Have the next reduction of every tensor send all of its residual.

    That reduction is sent as float32 on all ranks, as soon as one of them has called this. Its
    result contains the residuals of all ranks, and leaves none. Tensors without a residual are not
    affected. The call itself sends nothing. ValueError before init().
    """
    context = _context()
    for hook in _world.flush_hooks:
        hook()
    context.flush_residuals()


def at_flush(hook: Callable[[], None]) -> None:
    """Have flush_residuals() call `hook`, which passes pending values to the core."""
    _world.flush_hooks.append(hook)


def stats() -> dict[str, int]:
    """Counters of this rank; perseus.stats() documents them."""
    return _context().stats()


def speeds(group: int = 0) -> _core.Speeds:
    """The speeds on which `compression=auto` decides; measurement 0 if nothing has asked for it."""
    return _context().speeds(group)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording a Chrome trace of all operations into a file; see docs/timeline.md.

    file_path: of rank 0; other ranks write only with PERSEUS_TIMELINE_ALL_RANKS=1, with their
    number before its suffix. A recording into another file ends first; one into the same file
    continues.
    mark_cycles: mark where negotiation rounds begin.
    Blocks until that is done. ValueError when HOROVOD_TIMELINE was not set at init() (DYNAMIC arms
    this call and records nothing by itself), or when the file cannot be written.
    """
    _context().start_timeline(os.fsencode(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording; the file is complete on return. Does nothing if there is none."""
    _context().stop_timeline()


def mpi_threads_supported() -> bool:
    """Horovod's question about MPI; ValueError, since mpi_enabled() is False."""
    _context()
    raise ValueError("Horovod MPI is not enabled")


def mpi_built() -> bool:
    """False: nothing is compiled against MPI."""
    return False


def mpi_enabled() -> bool:
    """False, as without MPI in Horovod, even if PERSEUS_CPU_OPERATIONS=mpi sends data over MPI."""
    return False


def gloo_built() -> bool:
    """True: what Horovod's scripts ask for under this name is the built-in backend."""
    return True


def gloo_enabled() -> bool:
    """Whether the built-in backend is running, i.e. after init()."""
    return is_initialized()


def nccl_built() -> int:
    """0, although NCCL may be summing: scripts multiply Adasum's learning rate by it.

    Horovod built with NCCL averages inside a host before Adasum, so its examples scale the rate by
    local_size() then. Perseus does Adasum among all ranks, as Horovod does on CPUs. `perseusrun
    --check-build` tells of the NCCL that is there.
    """
    return 0


def ddl_built() -> bool:
    """False: IBM's DDL does not exist any more."""
    return False


def ccl_built() -> bool:
    """False: nothing is compiled against oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether tensors on GPUs are served here: whether there is a driver of NVIDIA that can."""
    from perseus import _core

    try:
        _core.find_cuda()
    except HorovodInternalError:
        return False
    return True


def rocm_built() -> bool:
    """False: nothing is compiled against ROCm."""
    return False
