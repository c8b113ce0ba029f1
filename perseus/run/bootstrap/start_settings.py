"""Reads the environment variables for the bootstrap of a job. Stateless, thread-safe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_SHORTEST_SECRET = 16


def setting(*names: str, default: str = "") -> str:
    """Return the first of these environment variables that is set and not empty, or `default`."""
    return next((value for name in names if (value := os.environ.get(name))), default)


def whole_number(*names: str, default: int, least: int, most: int) -> int:
    """Return the first of these environment variables that is set, as a whole number.

    Raises ValueError, which names the variable and its value, unless it is in least..most.
    """
    for name in names:
        if text := setting(name):
            if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
                raise ValueError(
                    f"[rendezvous] {name}='{text}': expected a whole number {least}..{most}"
                )
            return int(text)
    return default


def start_timeout() -> int:
    """Return how many seconds ranks wait for each other in the bootstrap."""
    return whole_number(
        "HOROVOD_START_TIMEOUT", "PERSEUS_START_TIMEOUT", default=60, least=1, most=1_000_000
    )


def given_secret() -> bytes | None:
    """Return the secret in PERSEUS_SECRET_FILE, else in PERSEUS_SECRET, else None.

    Raises ValueError if the file cannot be read or is readable by others, or if the secret has
    fewer than 16 bytes.
    """
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
