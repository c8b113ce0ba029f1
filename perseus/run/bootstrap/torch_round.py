"""How ranks agree on one announcement through torch's store, which may hold older ones.

torchrun's agents keep their store when they start workers anew, and no variable tells such a round
from the one before: TORCHELASTIC_RESTART_COUNT counts the failures of one agent's workers, so it
differs between agents, and stays when members join or leave. A rank therefore answers the
announcement that it finds with a random number, and believes it once rank 0 has seen that number.
One thread.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

_ANNOUNCED = "perseus/announced"  # what rank 0 of the latest round has set
_LOOK_AGAIN_SECONDS = 0.02


def announce(store: Any, text: str, size: int, deadline: float, late: str) -> None:
    """Rank 0 tells all others `text`; returns once each of them has read it.

    ValueError with what one of them has found wrong with it; TimeoutError at the deadline, of
    time.monotonic(), with the missing ranks in front of `late`.
    """
    number = secrets.token_hex(16)
    answers = [_answer(number, rank) for rank in range(1, size)]
    store.set(_ANNOUNCED, json.dumps([number, text]))
    while not store.check(answers):
        if time.monotonic() > deadline:
            missing = [str(i + 1) for i, key in enumerate(answers) if not store.check([key])]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise TimeoutError(f"[rendezvous] {ranks} did not come to {late}")
        time.sleep(_LOOK_AGAIN_SECONDS)
    told = [json.loads(store.get(key)) for key in answers]
    complaint = next((text for _, text in told if text), "")
    for nonce, _ in told:
        store.set(_verdict(number, nonce), json.dumps(complaint))
    if complaint:
        raise ValueError(complaint)


def await_announcement(
    store: Any, rank: int, read: Callable[[str], Found], deadline: float, late: str
) -> Found:
    """What `read` makes of rank 0's text; ValueError on all ranks where it raises one on any.

    TimeoutError at the deadline, of time.monotonic(); late: what it says rank 0 did not do.
    """
    nonce = secrets.token_hex(16)
    answered, found = "", None
    while True:
        if answered and store.check([_verdict(answered, nonce)]):
            complaint = json.loads(store.get(_verdict(answered, nonce)))
            if complaint or found is None:
                raise ValueError(complaint)
            return found
        if store.check([_ANNOUNCED]):
            number, text = json.loads(store.get(_ANNOUNCED))
            if number != answered:
                complaint = ""
                try:
                    found = read(text)
                except ValueError as error:
                    found, complaint = None, str(error)
                store.set(_answer(number, rank), json.dumps([nonce, complaint]))
                answered = number
        if time.monotonic() > deadline:
            raise TimeoutError(f"[rendezvous] rank 0 did not {late}")
        time.sleep(_LOOK_AGAIN_SECONDS)


def _answer(number: str, rank: int) -> str:
    return f"perseus/{number}/rank {rank}"


def _verdict(number: str, nonce: str) -> str:
    return f"perseus/{number}/{nonce}"
