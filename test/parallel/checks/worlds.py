"""Worlds that a check needs with other settings, whatever the framework."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from perseus import basics, control


@contextmanager
def world_with(**settings: object) -> Iterator[None]:
    """A world of the same ranks with other settings; the old ones come back afterwards."""
    control.gather_lines("", "leaving")
    basics.shutdown()
    os.environ.update({name: str(value) for name, value in settings.items()})
    basics.init()
    yield
    control.gather_lines("", "leaving")
    basics.shutdown()
    for name in settings:
        del os.environ[name]
    basics.init()
