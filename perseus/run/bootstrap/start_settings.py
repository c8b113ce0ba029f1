"""Environment variables for the bootstrap of a job, read when they are needed.

Stateless.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_SHORTEST_SECRET = 16


def setting(*names: str, default: str = "") -> str:
    """The first of these environment variables that is set and not empty, else `default`."""
    return next((value for name in names if (value := os.environ.get(name))), default)


def whole_number(*names: str, default: int, least: int, most: int) -> int:
    """The same for a number; ValueError naming variable and value."""
    for name in names:
        if text := setting(name):
            if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
                raise ValueError(
                    f"[rendezvous] {name}='{text}': expected a whole number {least}..{most}"
                )
            return int(text)
    return default


def start_timeout() -> int:
    """Seconds that ranks wait for each other at the start."""
    return whole_number(
        "HOROVOD_START_TIMEOUT", "PERSEUS_START_TIMEOUT", default=60, least=1, most=1_000_000
    )


def given_secret() -> bytes | None:
    """The secret of PERSEUS_SECRET_FILE, else of PERSEUS_SECRET, else None."""
    if path := setting("PERSEUS_SECRET_FILE"):
        try:
            mode = Path(path).stat().st_mode
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(
                f"[rendezvous] PERSEUS_SECRET_FILE='{path}': {error.strerror}"
            ) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"[rendezvous] PERSEUS_SECRET_FILE='{path}': others may read it; chmod 600 it"
            )
        source = "PERSEUS_SECRET_FILE"
    elif text := setting("PERSEUS_SECRET"):
        secret, source = os.fsencode(text), "PERSEUS_SECRET"
    else:
        return None
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(
            f"[rendezvous] {source}: {len(secret)} bytes are too few, expected at least "
            f"{_SHORTEST_SECRET}; make one with: openssl rand -hex 16"
        )
    return secret
