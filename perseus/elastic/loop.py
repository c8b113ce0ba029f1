"""The loop around elastic training: run, and when the world breaks, restore and run again.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.common.elastic.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from perseus import basics, feeding, process_sets
from perseus.elastic import known_blocks
from perseus.elastic.notification import notification_manager
from perseus.elastic.state import State
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt, InitializationError
from perseus.gradients.aggregation import forget_passes

_log = logging.getLogger(__name__)

# A rank that was late for one start, or saw another rank leave in the middle of it, catches up with
# the others: a start that one rank gave up ends at once for ranks that arrive later.
_STARTS = 3


class _Loops:
    """Numbers the loops that this process has begun.

    A call that follows one of the same function with the same state belongs to the same loop:
    there, a new rank that takes over the state in its first call is where the others are.
    """

    def __init__(self) -> None:
        self._number = 0
        self._code: Any = None
        self._state: Callable[[], State | None] = lambda: None

    def begin(self, func: Callable[..., Any], state: State) -> int:
        """Return the number of the loop that a call belongs to, from 1 on."""
        while isinstance(func, functools.partial):
            func = func.func
        code = getattr(inspect.unwrap(func), "__code__", func)  # equal where it is defined anew
        if code != self._code or self._state() is not state:
            self._number += 1
            self._code, self._state = code, weakref.ref(state)
        return self._number


_loops = _Loops()


def reset() -> None:
    """Leave the world and join the next one: the same ranks, or those that perseusrun chooses.

    Process sets that were given to init() are registered again in their order, where the new world
    has ranks of them, unless sets are dynamic: then the script registers the sets that it needs in
    a reset callback, as with Horovod. The other ranks may arrive at any time within three times
    HOROVOD_START_TIMEOUT; otherwise InitializationError.
    """
    sets = process_sets.static_sets()
    basics.shutdown_for_next()
    starts = _STARTS if basics.membership() is None else 1  # init() tries again by itself
    for attempt in range(1, starts + 1):
        try:
            basics.init(process_sets=sets)
            return
        except InitializationError as error:
            if attempt == starts:
                raise
            _log.warning("[elastic] start %d of %d failed: %s", attempt, starts, error)


def failure_if(*errors: type[Exception]) -> Callable[[Exception], str | None]:
    """Return a function for looped(): these errors tell of the world's failure, if it has one."""
    return lambda error: basics.world_failure() if isinstance(error, errors) else None


def run_fn(func: Callable[..., Any], reset: Callable[[], Any] = reset) -> Callable[..., Any]:
    """Wrap `func(state, *args, **kwargs)` so that it starts again when the world breaks.

    The wrapper makes the state equal on all ranks, calls `func` and returns its result.
    HorovodInternalError: the state goes back to its last commit, and the other ranks' operations
    end with that error, too. HostsUpdatedInterrupt: the state stays as it is. After both,
    `reset()` makes a new world, state.on_reset() is called and `func` starts anew. Everything else
    that `func` raises, and whatever reset() raises, ends the wrapper.

    In an elastic job of perseusrun, a process may call several such functions one after the other,
    but no new ranks join after the first: they would begin with that one.

    func: its first argument is a perseus.elastic.State. reset: leaves the world, joins the next.
    """
    return looped(func, reset, lambda _: None)


def looped(
    func: Callable[..., Any],
    reset: Callable[[], Any],
    reason_of: Callable[[Exception], str | None],
) -> Callable[..., Any]:
    """Do what run_fn() does.

    reason_of: for a framework's own error, by which it may report that the world has broken,
    returns why it has; None for errors that propagate.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        new_world = skip_sync = saves = False
        notification_manager.init()
        notification_manager.register_listener(state)
        member = basics.membership()
        if member is not None and member.has_state is None:  # a process that has not trained yet
            member.has_state = False
        if member is not None and isinstance(state, State):
            member.tell_loop(_loops.begin(func, state))
            feeding.attach(member).contents = state.contents
        try:
            while True:
                try:
                    try:
                        if saves:
                            state.save()
                        if new_world:
                            state.on_reset()
                        if not skip_sync:
                            with known_blocks.used_if_fed():
                                state.sync()
                        if member is not None:
                            if isinstance(state, State) and member.place is not None:
                                state._commits = max(state._commits, member.place.commits)
                            if not skip_sync:
                                # What this rank goes back to, and may then give to all as rank 0.
                                state.save()
                            member.has_state = True
                        return func(state, *args, **kwargs)
                    except HostsUpdatedInterrupt as interrupt:
                        _log.warning("[elastic] hosts have changed: starting anew")
                        skip_sync = interrupt.skip_sync
                        if not skip_sync:
                            # sync() sends the saved values, which must therefore be the present.
                            state.save()
                except Exception as error:
                    is_ours = isinstance(error, HorovodInternalError)
                    reason = str(error) if is_ours else reason_of(error)
                    if reason is None:
                        raise
                    _log.warning("[elastic] going back to the last commit: %s", reason)
                    # Before restoring: reductions of this step would write into what is restored,
                    # and others wait for operations that this rank will not start any more.
                    basics.end_world()
                    state.restore()
                    forget_passes()  # their steps are undone by now
                    skip_sync = False
                if member is not None:
                    member.will_sync = not skip_sync
                    member.commits = state._commits if isinstance(state, State) else 0
                reset()
                place = None if member is None else member.place
                saves = skip_sync and place is not None and place.sync  # others lack the state
                skip_sync = skip_sync and not saves
                new_world = True
        finally:
            notification_manager.remove_listener(state)
            if member is not None:
                feeding.attach(member).contents = list

    return wrapper
