"""The message with which rank 0 announces its store, over a channel that others may read.

A secret from the user is never sent: an HMAC proves that all ranks were given the same one. A
secret that rank 0 has made is sent, so it is as safe as the channel. Pure functions, thread-safe.
common/bootstrap/bootstrap.cc implements the same for programs without Python.
"""

from __future__ import annotations

import hmac
import json
import secrets

_LABEL = "perseus announced store"
_FAILED = "rank 0 could not start: "
_REMEDY = "give all ranks the same PERSEUS_SECRET_FILE (or PERSEUS_SECRET), or none"


def announcement(host: str, port: int, secret: bytes, given: bool) -> str:
    """Return the announcement as one line of JSON, for read_announcement().

    given: whether the secret comes from the user, rather than from this rank 0.
    """
    if not given:
        return json.dumps([host, port, secret.decode("latin-1"), "", ""])
    nonce = secrets.token_hex(16)
    return json.dumps([host, port, "", nonce, _check(secret, nonce, host, port)])


def failure_announcement(error: Exception) -> str:
    """Return what rank 0 announces in place of a store, for read_announcement() to raise.

    The end of a long line may be cut off.
    """
    return _FAILED + " ".join(str(error).split())


def read_announcement(text: str | bytes, given: bytes | None, rank: int) -> tuple[str, int, bytes]:
    """Return the host, port and secret of an announcement.

    given: the secret that the user gave to this rank; None without one.

    Raises ValueError if rank 0 could not start, was given another secret, or only one of the ranks
    was given any, and for what is no announcement.
    """
    if not isinstance(text, str):
        text = text.decode(errors="ignore")
    if text.startswith(_FAILED):
        raise ValueError(f"[rendezvous] {' '.join(text.split())}")
    try:
        host, port, made, nonce, check = json.loads(text)
        secret = made.encode("latin-1")
        claimed = check.encode()
        if not (isinstance(host, str) and isinstance(nonce, str)):
            raise TypeError
        if not 0 < port < 65536 or port != int(port):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError("[rendezvous] what rank 0 announced is no address of a store") from None
    if secret:
        if given is not None:
            raise ValueError(
                f"[rendezvous] rank {rank} was given a secret, but rank 0 was not: {_REMEDY}"
            )
        return host, int(port), secret
    if given is None:
        raise ValueError(f"[rendezvous] rank {rank} was given no secret, but rank 0 was: {_REMEDY}")
    if not hmac.compare_digest(claimed, _check(given, nonce, host, int(port)).encode()):
        raise ValueError(f"[rendezvous] rank {rank} has another secret than rank 0: {_REMEDY}")
    return host, int(port), given


def _check(secret: bytes, nonce: str, host: str, port: int) -> str:
    statement = json.dumps([_LABEL, nonce, host, port]).encode()
    return hmac.new(secret, statement, "sha256").hexdigest()
