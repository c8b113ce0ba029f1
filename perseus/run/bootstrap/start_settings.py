"""Reads the environment variables for the bootstrap of a job. Stateless, thread-safe."""

from __future__ import annotations

import os
import select
import stat
import time

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


def gives_secret() -> bool:
    """Return whether the user gives a secret; given_secret() reads it."""
    return bool(setting("PERSEUS_SECRET_FILE", "PERSEUS_SECRET"))


def given_secret() -> bytes | None:
    """Return the secret in PERSEUS_SECRET_FILE, else in PERSEUS_SECRET, else None.

    Call it once in a bootstrap, since the file may be a pipe.

    Raises ValueError if the file cannot be read or is readable by others, or if the secret has
    fewer than 16 bytes.
    """
    if path := setting("PERSEUS_SECRET_FILE"):
        try:
            secret, source = _read_secret(path), "PERSEUS_SECRET_FILE"
        except OSError as error:
            why = error.strerror or str(error)
            raise ValueError(f"[rendezvous] PERSEUS_SECRET_FILE='{path}': {why}") from None
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


def _read_secret(path: str) -> bytes:
    # Opening a pipe must not wait for whoever writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        if os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise OSError("others may read it; chmod 600 it")
        limit = start_timeout()
        deadline = time.monotonic() + limit
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        secret = b""
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if (piece := file.read(4096)) == b"":
                return secret.strip()
            secret += piece or b""
    raise OSError(
        f"a pipe whose end did not come within {limit} s (HOROVOD_START_TIMEOUT): let what writes "
        "the secret close it, or name a file"
    )
