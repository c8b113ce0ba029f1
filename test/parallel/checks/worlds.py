"""Worlds that a check needs with other settings, whatever the framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from perseus import basics, control
from perseus.elastic.loop import reset


@contextmanager
def world_with(**settings: object) -> Iterator[None]:
    """A world of the same ranks with other settings; the old ones come back afterwards."""
    control.gather_lines("", "leaving")
    leave_world()
    os.environ.update({name: str(value) for name, value in settings.items()})
    basics.init()
    yield
    control.gather_lines("", "leaving")
    leave_world()
    for name in settings:
        del os.environ[name]
    basics.init()


def next_world() -> None:
    """Begin the next world of the same ranks, once every rank has come this far.

    What a rank only starts, such as an average that later steps wait for, holds no other one up:
    without this, a fast rank would end the world while a slow one is still in its last step.
    """
    control.gather_lines("", "leaving")
    reset()


def leave_world() -> None:
    """Shut down, and forget the errors of what was still under way and that nobody waits for.

    MXNet would raise them in a later check, whose operations use the same temporary memory.
    """
    basics.shutdown()
    if (mxnet := sys.modules.get("mxnet")) is not None:
        with suppress(mxnet.base.MXNetError):
            mxnet.nd.waitall()
