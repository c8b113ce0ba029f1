"""The backend "perseus" of torch.distributed, and how torch finds it.

From torch 2.14 on it is a c10d Backend, so a process group may have others beside it
("cpu:perseus,cuda:nccl"). Older versions take a ProcessGroup in Python alone, which then is the
whole group.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from perseus import basics, ddp
from perseus.errors import HorovodInternalError
from perseus.run.bootstrap.torch_round import ANNOUNCED
from perseus.torch.distributed.collectives import Collectives
from perseus.torch.distributed.completer import rest
from perseus.torch.distributed.direct import shorten_calls
from perseus.torch.distributed.gradients import take_models
from perseus.torch.distributed.launched import forget_world
from perseus.torch.distributed.monitored_barriers import allow_monitored_barriers
from perseus.torch.distributed.overloads import in_all_forms
from perseus.torch.distributed.sync_batch_norm import accept_cpu_tensors
from perseus.torch.distributed.work import Receive, Work, latest
from perseus.torch.distributed.world import World
from perseus.torch.untraced import leave_untraced

NAME = "perseus"
IS_BACKEND = hasattr(c10d.Backend, "supports_reconfigure")  # since 2.14: Python may subclass it

_HOST = "cpu"
_DEVICES = (_HOST, "cuda")
_ANSWER_TIME = timedelta(seconds=5)
_LOOK_AGAIN_SECONDS = 0.01
_BOTH_NOTICE_SECONDS = 5
# Groups that are open. c10d may keep no reference to their Python objects, only to what it calls.
_open: set[Any] = set()


class _Life(Collectives):
    """The life of a group, and what a Backend must have beside collectives."""

    def _join(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._barriers = 0
        self._models = count(1)
        self._options: Any = None
        self._shrunk = False
        self._last_split: tuple[Any, list[int], Any] = (None, [], None)
        self.world = World(store, rank, size, timeout)
        self._begin()
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """Return what get_backend() shows."""
        return NAME

    def new_gradients(self) -> int:
        """Return the number of the next model whose gradients this group reduces."""
        return next(self._models)

    @property
    def options(self) -> Any:
        """What c10d hands to split() for a group of some of these ranks."""
        if self._options is None:
            limit = timedelta(seconds=self.world.seconds)
            self._options = c10d.Backend.Options(NAME, timeout=limit)
            self._options.global_ranks_in_group = list(range(self.world.size))
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """Whether split_group() works: it makes another world of some of the ranks."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether c10d brackets batches of operations: the core fuses what is under way anyway."""
        return False

    # What c10d asks a Backend in Python, whose own answer would ask again, without end.
    supports_reconfigure = supports_window = supports_coalescing
    supports_time_estimate = _supports_time_estimate = supports_coalescing  # 2.14, and 2.15

    @property
    def supports_shrinking(self) -> bool:
        """Whether shrink_group() works: it makes another world, as a split does."""
        return True

    def split(self, store: c10d.Store, ranks: list[int], opts: Any) -> Any:
        """Return a group of `ranks`, which are numbers in this one, in their order; None outside.

        store: with a prefix of the new group's own. opts: with its timeout; None for this group's.
        """
        if self.world.rank not in ranks:
            return None
        # One backend serves all devices, but c10d may ask for each of them.
        if self._last_split[:2] != (store, ranks):
            timeout = timedelta(seconds=self.world.seconds) if opts is None else opts._timeout
            own = ranks.index(self.world.rank)
            self._last_split = store, ranks, PerseusBackend(store, own, len(ranks), timeout)
        return self._last_split[2]

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: who is in no part of a split has no part in it."""

    def shrink(self, excluded: list[int], flags: int = 0, opts: Any = None) -> Any:
        """Return a group without the ranks `excluded`, which may be dead and do not call this.

        flags: SHRINK_ABORT to end what is under way in this group, which is left either way once
        the new one is there. opts: as for split().
        """
        if flags:
            self.abort()
        ranks = [rank for rank in range(self.world.size) if rank not in excluded]
        store = c10d.PrefixStore("perseus/shrunk/", self._store)
        shrunk = self.split(store, ranks, opts)
        self._shrunk = True
        return shrunk

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Return once every rank is here; rank 0 raises RuntimeError that names those who are not.

        opts: its timeout is the limit, or it is the limit itself, as in gloo's binding; the group's
        without one. All missing ranks are named, whatever wait_all_ranks says. The other ranks
        raise the same error, or name rank 0 if it has not told them the end a while after the
        limit.
        """
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
        if limit is None or limit < timedelta(0):  # c10d's options say so that they have none
            limit = timedelta(seconds=self.world.seconds)
        seconds = limit.total_seconds()
        self._barriers += 1
        group = f"perseus/{self._token()}/barrier "
        prefix = f"{group}{self._barriers}/"
        deadline = time.monotonic() + seconds
        if self.world.rank != 0:
            self._store.set(f"{prefix}{self.world.rank}", "")
            try:
                self._store.wait([f"{prefix}end"], limit + _ANSWER_TIME)
            except RuntimeError as error:
                if time.monotonic() < deadline:  # the store is lost
                    raise
                raise RuntimeError(_missing([0], seconds)) from error
            if problem := self._store.get(f"{prefix}end").decode():
                raise RuntimeError(problem)
            return
        keys = [f"{prefix}{rank}" for rank in range(1, self.world.size)]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_SECONDS)
        missing = [i + 1 for i, key in enumerate(keys) if not self._store.check([key])]
        problem = _missing(missing, seconds) if missing else ""
        self._store.set(f"{prefix}end", problem)
        if problem:
            raise RuntimeError(problem)
        with suppress(RuntimeError):  # not every store can
            # Who is here has read the end of the last barrier.
            for key in (*keys, f"{group}{self._barriers - 1}/end"):
                self._store.delete_key(key)

    def _token(self) -> str:
        """Return what tells this group from earlier ones, whose keys the store may still have."""
        if self.world.size == 1:
            return ""
        # The number of the announcement by which exactly these ranks have come together.
        number: str = json.loads(self._store.get(ANNOUNCED))[0]
        return number

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has started; torch's debug mode compares them."""
        return self.started

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts from 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations, also those under way, wait for other ranks for as long as this.

        How soon a silent rank counts as dead stays as it was when the group was made.
        """
        self.world.set_timeout(timeout)
        self._options = None

    # c10d has had it under both names.
    _set_default_timeout = set_timeout

    def get_error(self) -> Any:
        """Return SUCCESS while the group works, and else why it has ended, as a c10d.ErrorType.

        TIMEOUT: this rank waited for longer than the timeout. REMOTE_ERROR: another rank ended the
        group, or told of the failure that it saw. COMM_ERROR: a rank was lost, or this rank has
        left.
        """
        return self.world.error()

    def abort(self) -> None:
        """End the group at once, on every rank: what is pending fails."""
        self.world.shutdown()

    def shutdown(self) -> None:
        """Leave the group once every rank wants to, so that others can end what they have begun.

        After an exception, or when the group has failed, this rank leaves at once: what is pending
        then fails on every rank.
        """
        if self in _open:
            _open.discard(self)
            if sys.exc_info()[0] is None and not self._shrunk:
                self.world.await_all()
            self.world.close()


@in_all_forms
class _WholeGroup(_Life):
    """What a ProcessGroup in Python must have beside that."""

    _name = _description = ""

    def getRank(self) -> int:  # noqa: N802 - c10d's names, here and below
        """Return this process's number in the group."""
        return self.world.rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self.world.size

    @property
    def _device_types(self) -> list[torch.device]:
        """Whose tensors it takes. Checkpoints and FSDP1 choose among them."""
        return [torch.device(name) for name in dist.Backend.backend_capability[NAME]]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what serves a device: this group, which is its only backend."""
        served = dist.Backend.backend_capability[NAME]
        if device.type not in served:
            here = " and ".join(served)
            raise RuntimeError(f"[torch] {NAME} serves {here} tensors here, not {device.type}")
        return self

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name by which c10d finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return it."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Keep the user's description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return it."""
        return self._description

    def get_group_store(self) -> c10d.Store:
        """Return the store by which the group has met."""
        return self._store

    # Old versions of torch split and shrink only backends of their own.
    supports_splitting = supports_shrinking = _Life.supports_coalescing

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether FSDP2 can have its buffers from here; it makes them itself."""
        return False

    # Older names of methods.
    _allgather_base = Collectives.all_gather_single
    _reduce_scatter_base = Collectives.reduce_scatter_single
    allgather_into_tensor_coalesced = Collectives.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = Collectives.reduce_scatter_single_coalesced
    alltoall_base = Collectives.all_to_all_single


_OURS: Any = _Life if IS_BACKEND else _WholeGroup
_THEIRS: Any = c10d.Backend if IS_BACKEND else dist.ProcessGroup


class PerseusBackend(_OURS, _THEIRS):  # type: ignore[misc]
    """What c10d calls: a Backend or a ProcessGroup on a world of Perseus."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """See World."""
        _THEIRS.__init__(self, rank, size)
        self._join(store, rank, size, timeout)


def _create(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    accept_cpu_tensors()
    leave_untraced(PerseusBackend, Work, Receive)
    return PerseusBackend(store, rank, size, timeout)


def _missing(ranks: list[int], seconds: float) -> str:
    """The end of a monitored barrier without these ranks, in the words of gloo."""
    named = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"[torch] {named} failed to pass monitoredBarrier in {1000 * seconds:g} ms"


@atexit.register
def _end() -> None:
    """Leave the groups that the script has not destroyed: their ranks need not wait for a clock."""
    rest()
    _close_all()
    rest()  # with the errors of what was under way


def _close_all() -> None:
    for group in list(_open):
        group.world.close()


def failure_of(error: Exception) -> str | None:
    """Return why the world has broken, if an error of torch.distributed comes from that.

    None for all other errors.
    """
    if not isinstance(error, RuntimeError):
        return None
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HorovodInternalError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return basics.world_failure() or str(error)
    # DDP puts the text of what a hook's future raises into an error of its own, without the cause.
    ended: list[str] = [why for group in list(_open) if (why := group.world.failure()) is not None]
    told = [why for why in ended if why in str(error)]
    if told:
        return basics.world_failure() or told[0]
    # torch's store and groups tell of a lost rank at the same time as the world.
    waits = bool(ended) or isinstance(error, dist.DistError)
    deadline = time.monotonic() + (_BOTH_NOTICE_SECONDS if waits else 0)
    while (failure := basics.world_failure()) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_SECONDS)
    return failure


def _abort_all() -> None:
    """End all groups, on every rank."""
    for group in list(_open):
        group.abort()


def _destroy_all() -> None:
    """Leave all groups together, before the next world of an elastic job has groups of its own."""
    if _open and dist.is_initialized():
        dist.destroy_process_group()
    _close_all()
    _open.clear()
    if basics.membership() is not None and not dist.is_initialized():
        # torch counts groups, also those that did not come about, and ranks must count alike.
        dist.distributed_c10d._world.group_count = 0
    forget_world()
    # Wrappers that nobody has any more would reduce the next step's gradients in their group.
    latest.work = None  # its error knows the frames that know them
    gc.collect()


def register() -> None:
    """Make init_process_group("perseus") known to torch. A second call does nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        if IS_BACKEND:
            shorten_calls()
        else:
            allow_monitored_barriers(partial(_group_of, device_type=_HOST))
        dist.Backend.register_backend(NAME, _create, devices=_devices_here())
        take_models(_group_of)
        ddp.follow_rendezvous()
        basics.at_end(_abort_all)
        basics.at_reset(_destroy_all)


def _devices_here() -> list[str]:
    """Return the types of this host's devices: torch makes tensors of its own on those given it.

    Asks NVML, if it knows: processes that are forked once CUDA has been asked cannot use GPUs.
    """
    return list(_DEVICES if torch.cuda.device_count() > 0 else _DEVICES[:1])


def _group_of(process_group: Any, device_type: str) -> PerseusBackend | None:
    if device_type not in _DEVICES:
        return None
    found = process_group
    if IS_BACKEND:
        found = process_group._get_backend(torch.device(device_type))
    return found if isinstance(found, PerseusBackend) else None
