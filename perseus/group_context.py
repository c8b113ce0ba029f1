"""A context of the core for one group of processes that share a key-value store of their framework.

It is independent of the world that init() joins. Thread-safe: nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from perseus.errors import InitializationError

if TYPE_CHECKING:
    from perseus import _core

# How soon a rank that sends no sign of life is dead, however long operations may take.
_LIVENESS_SECONDS = 60
# The settings below take no more; nobody tells 11 days from the year that some scripts ask for.
LONGEST_TIMEOUT = 1_000_000
_PROCESS_GROUP = 1  # PERSEUS_API_PROCESS_GROUP


def group_context(
    store: Any,
    rank: int,
    size: int,
    timeout: int,
    *,
    settings: Sequence[str] = (),
    interrupted: Callable[[], None] | None = None,
) -> _core.Context:
    """Connect to the other ranks of a group, which must do the same within `timeout` seconds.

    timeout: 1 to LONGEST_TIMEOUT.
    store: with set(key, text), get(key) -> bytes and check(keys) -> bool, as torch's stores have
    them, and a prefix of this group's own. An operation that has not ended after `timeout` fails,
    and the message names the ranks that take no part in it. settings: "NAME=value", in place of
    what the environment says. interrupted: is called while ranks are waited for; what it raises
    ends that.

    Raises InitializationError, which names the ranks that are missing, the setting that is wrong or
    what `interrupted` has raised.
    """
    core = import_module("perseus._core")
    overrides = [
        *settings,
        f"HOROVOD_START_TIMEOUT={timeout}",
        f"GLOO_TIMEOUT_SECONDS={min(timeout, _LIVENESS_SECONDS)}",
        f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={timeout}",
        f"HOROVOD_STALL_CHECK_TIME_SECONDS={timeout}",
    ]
    if size == 1:
        alone: _core.Context = core.Context(rank=0, size=1, overrides=overrides, api=_PROCESS_GROUP)
        return alone
    from perseus.run.bootstrap.rendezvous import find_store_through

    try:
        watched = _WatchedStore(store, interrupted) if interrupted else store
        found = find_store_through(watched, rank, size, timeout)
        made: _core.Context = core.Context(
            rank=rank,
            size=size,
            store_host=found.host,
            store_port=found.port,
            secret=found.secret,
            overrides=overrides,
            api=_PROCESS_GROUP,
            interrupted=interrupted,
        )
    except (ValueError, RuntimeError, TimeoutError, OSError) as error:
        raise InitializationError(f"[group] no process group: {error}") from None
    return made


class _WatchedStore:
    """A store that calls `interrupted` whenever somebody who waits looks for a key."""

    def __init__(self, store: Any, interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted
        self._check = store.check
        self.set, self.get = store.set, store.get

    def check(self, keys: list[str]) -> Any:
        self._interrupted()
        return self._check(keys)
