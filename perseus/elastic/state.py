"""The state of training: values that are saved, restored and made equal on all ranks.

Belongs to the training thread, except on_hosts_updated, which any thread may call.
Source of behaviour: Horovod 0.28.1, horovod.common.elastic.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from perseus import basics, control
from perseus.elastic.notification import HostUpdateResult, notification_manager
from perseus.errors import HostsUpdatedInterrupt
from perseus.feeding import note_step
from perseus.gradients.rotation import synchronize_parameters

# Ranks that look for new ones more often let these be fed to the end.
_OFTEN_SECONDS = 5.0


def _from_rank_0(obj: Any) -> Any:
    return control.broadcast_object(obj, 0, None, 0)


class State:
    """The contract between training and `run`; subclasses implement save, restore and sync.

    bcast_object: rank 0's object on every rank; pickles it by default. get_rank: this process's
    rank.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = _from_rank_0,
        get_rank: Callable[[], int] = basics.rank,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0  # so many of the training that the present values have come from
        self._checked_at = -inf
        self._are_averaged = False  # parameters, in a commit

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call each, without arguments, when a new world has started, e.g. to scale lr."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called in a new world: forget old news, reset(), and call the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Hosts came or went at `timestamp`; the next check_host_updates acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self, copy: bool = True) -> None:
        """Call save(), then check_host_updates(): a failure no longer loses the work up to here.

        Parameters that `Compression.rotate`, `hvd.LocalSGD` and `hvd.DiLoCo` let differ between
        ranks are made equal before.

        copy: False calls mark() instead, where the state can do without copies; see TorchState.
        """
        copies = copy or not self._can_mark()
        if copies:
            synchronize_parameters()
        self._commits += 1
        if copies:
            self.save()
        else:
            self.mark()
            # A collective: other ranks may have to copy, whose optimizers live longer.
            synchronize_parameters()
        self._are_averaged = True
        try:
            self.check_host_updates()
        finally:
            self._are_averaged = False

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has learned of a change of hosts.

        Before that, parameters are made equal as by commit(): in the next world, all ranks take
        over rank 0's, or lack those of ranks that leave.

        Collective: every rank must call it. Cheaper than commit(), so it may be called more often.
        """
        before = latest = self._last_updated_timestamp
        changes = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                changes |= change
        now = time.monotonic()
        is_often, self._checked_at = now < self._checked_at + _OFTEN_SECONDS, now
        if changes == HostUpdateResult.added and notification_manager.is_feeding and is_often:
            self._host_messages.put((latest, changes))  # for the next time
            latest = before
        note_step()
        before, latest, changes = self._bcast_object((before, latest, changes))
        self._last_updated_timestamp = latest
        if latest > before:
            if not self._are_averaged:
                synchronize_parameters()
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def save(self) -> None:
        """Remember the present values, in memory."""
        raise NotImplementedError

    def mark(self) -> None:
        """Take the present values for saved, without a copy."""
        raise NotImplementedError

    def _can_mark(self) -> bool:
        """Whether a failure leaves what has been marked as it is."""
        return False

    def restore(self) -> None:
        """Go back to the values last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's values. Collective."""
        raise NotImplementedError

    def contents(self) -> Iterable[memoryview]:
        """Yield the arrays that sync() sends, as contiguous bytes, so that new ranks can be fed.

        Called on other threads, while training changes the values. Nothing by default.
        """
        return ()

    def reset(self) -> None:
        """Adapt to a new world, before the reset callbacks; nothing by default."""


class ObjectState(State):
    """Plain Python values as attributes: `state = ObjectState(..., epoch=0)`, `state.epoch += 1`.

    bcast_object, get_rank: as for State. kwargs: the attributes and their first values; picklable.
    Saving keeps references, no copies.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = _from_rank_0,
        get_rank: Callable[[], int] = basics.rank,
        **kwargs: Any,
    ) -> None:
        self._saved_state = kwargs
        super().__init__(bcast_object, get_rank)
        self._show_saved()

    def save(self) -> None:
        """Remember the attributes' present values."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the values last saved."""
        self._show_saved()

    def sync(self) -> None:
        """Take over the values that rank 0 has saved last."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._show_saved()

    def _show_saved(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
