"""Exchanges an announcement through torch's store, which may hold announcements of earlier rounds.

torchrun's agents keep their store when they restart workers, and no variable tells a round from the
one before: TORCHELASTIC_RESTART_COUNT counts the failures of one agent's workers, so it differs
between agents and does not change when members join or leave. A rank therefore answers the
announcement that it finds with a nonce, and accepts it once rank 0 has confirmed that nonce.
Single-threaded.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

# The variables in which torch's launcher tells a rank who it is
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The keys that rank 0 of the latest round has set
ASKED = "perseus/asked"
ANNOUNCED = "perseus/announced"
_LOOK_AGAIN_SECONDS = 0.02


def ask(store: Any, size: int, deadline: float, late: str) -> list[str]:
    """Return, on rank 0, what each of the other ranks tells in await_announcement().

    deadline, late, and TimeoutError: as for announce().
    """
    number = secrets.token_hex(16)
    told = [_told(number, rank) for rank in range(1, size)]
    store.set(ASKED, number)
    _wait_for(store, told, deadline, late)
    return [store.get(key).decode() for key in told]


def announce(store: Any, text: str, size: int, deadline: float, late: str) -> None:
    """Send `text` from rank 0 to all other ranks; return once each of them has read it.

    deadline: in time.monotonic() seconds. late: the end of the message of the TimeoutError, which
        begins with the missing ranks.

    Raises ValueError with the error that a rank has reported about the text, and TimeoutError if
    ranks are missing at the deadline.
    """
    number = secrets.token_hex(16)
    answers = [_answer(number, rank) for rank in range(1, size)]
    store.set(ANNOUNCED, json.dumps([number, text]))
    _wait_for(store, answers, deadline, late)
    received = [json.loads(store.get(key)) for key in answers]
    error = next((text for _, text in received if text), "")
    for nonce, _ in received:
        store.set(_confirmation(number, nonce), json.dumps(error))
    if error:
        raise ValueError(error)


def _wait_for(store: Any, keys: list[str], deadline: float, late: str) -> None:
    """Wait for one key of each of the ranks from 1 on."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys, 1) if not store.check([key])]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise TimeoutError(f"[rendezvous] {ranks} did not come to {late}")
        time.sleep(_LOOK_AGAIN_SECONDS)


def await_announcement(
    store: Any,
    rank: int,
    read: Callable[[str], Found],
    deadline: float,
    late: str,
    *,
    tells: str = "",
) -> Found:
    """Return read(text) for the text of rank 0's announcement.

    tells: the text for rank 0's ask(), if it asks.
    deadline: in time.monotonic() seconds. late: the end of the message of the TimeoutError, which
        begins with "rank 0 did not".

    Raises ValueError on all ranks if `read` raises it on any rank; TimeoutError if rank 0 does not
    confirm the announcement by the deadline.
    """
    nonce = secrets.token_hex(16)
    asked, answered, found = "", "", None
    while True:
        if tells and store.check([ASKED]):
            number = store.get(ASKED).decode()
            if number != asked:  # the first may be of an earlier round
                store.set(_told(number, rank), tells)
                asked = number
        if answered and store.check([_confirmation(answered, nonce)]):
            problem = json.loads(store.get(_confirmation(answered, nonce)))
            if problem or found is None:
                raise ValueError(problem)
            return found
        if store.check([ANNOUNCED]):
            number, text = json.loads(store.get(ANNOUNCED))
            if number != answered:
                problem = ""
                try:
                    found = read(text)
                except ValueError as error:
                    found, problem = None, str(error)
                store.set(_answer(number, rank), json.dumps([nonce, problem]))
                answered = number
        if time.monotonic() > deadline:
            raise TimeoutError(f"[rendezvous] rank 0 did not {late}")
        time.sleep(_LOOK_AGAIN_SECONDS)


def _told(number: str, rank: int) -> str:
    return f"perseus/{number}/told by rank {rank}"


def _answer(number: str, rank: int) -> str:
    return f"perseus/{number}/rank {rank}"


def _confirmation(number: str, nonce: str) -> str:
    return f"perseus/{number}/{nonce}"
