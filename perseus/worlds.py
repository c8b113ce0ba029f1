"""Tells objects that go on in later worlds when one begins. Belongs to the thread that trains."""

from __future__ import annotations

import weakref
from typing import Protocol

from perseus import basics


class Lasting(Protocol):
    """An object that goes on in later worlds."""

    def begin_world(self) -> None:
        """Forget what new ranks, which have not trained in earlier worlds, do not have."""


_living: weakref.WeakSet[Lasting] = weakref.WeakSet()


def outlives_worlds(user: Lasting) -> None:
    """Call user.begin_world() at the end of every later init(), for as long as `user` exists."""
    _living.add(user)


def _begin_world() -> None:
    for user in list(_living):
        user.begin_world()


basics.at_init(_begin_world)
