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

ANNOUNCED = "perseus/announced"  # the key that rank 0 of the latest round has set
_LOOK_AGAIN_SECONDS = 0.02


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
    while not store.check(answers):
        if time.monotonic() > deadline:
            missing = [str(i + 1) for i, key in enumerate(answers) if not store.check([key])]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise TimeoutError(f"[rendezvous] {ranks} did not come to {late}")
        time.sleep(_LOOK_AGAIN_SECONDS)
    received = [json.loads(store.get(key)) for key in answers]
    error = next((text for _, text in received if text), "")
    for nonce, _ in received:
        store.set(_confirmation(number, nonce), json.dumps(error))
    if error:
        raise ValueError(error)


def await_announcement(
    store: Any, rank: int, read: Callable[[str], Found], deadline: float, late: str
) -> Found:
    """Return read(text) for the text of rank 0's announcement.

    deadline: in time.monotonic() seconds. late: the end of the message of the TimeoutError, which
        begins with "rank 0 did not".

    Raises ValueError on all ranks if `read` raises it on any rank; TimeoutError if rank 0 does not
    confirm the announcement by the deadline.
    """
    nonce = secrets.token_hex(16)
    answered, found = "", None
    while True:
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


def _answer(number: str, rank: int) -> str:
    return f"perseus/{number}/rank {rank}"


def _confirmation(number: str, nonce: str) -> str:
    return f"perseus/{number}/{nonce}"
