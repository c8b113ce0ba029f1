"""Averages another N-th of the parameters in every step, instead of gradients.

Each rank steps with its own host's gradients. After the step, or before it where steps are not
ours, it sends a part of its parameters, and all ranks' average comes while the next gradients are
computed. Then every rank adds what the average differs by from what it sent, so nobody waits, and
what steps have changed since stays. Replicas differ a little in between. (SPARTA: Baioumy and
Cheema 2025, Sparse parameter averaging; gossip: Assran et al. 2019, Stochastic gradient push.)

Turns belong to the thread that steps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

from perseus.errors import HorovodInternalError

SETTING = "PERSEUS_DOWNSAMPLE_N_ELEMENTS"


def rows_of(count: int, part: int, parts: int) -> slice:
    """Return the rows of a tensor with `count` rows that belong to a part, 0 <= part < parts."""
    return slice(count * part // parts, count * (part + 1) // parts)


class Turns(ABC):
    """Parameters that are averaged in turn; see the module.

    name: matches exchanges across ranks. parts: in so many steps each parameter is averaged once.
    """

    def __init__(self, name: str, parts: int) -> None:
        self._name = name
        self.parts = parts
        self._turn = 0
        self._pending: Any = None

    @property
    def name(self) -> str:
        """What exchanges are called, the same on all ranks."""
        return self._name

    def take_turn(self) -> None:
        """Send a part of the parameters, and correct those that were sent in the step before.

        A collective, once per step: right after it, or between the reduction of gradients and their
        application, where all ranks are sure to call it.
        """
        # Another part than the one under way, so that the new one need not wait for it.
        sent = self.send(self._turn)
        pending, self._pending = self._pending, sent
        self._turn = (self._turn + 1) % self.parts
        if pending is not None:
            self.correct(pending)

    def finish(self) -> None:
        """Wait for what is under way and correct the parameters. Not a collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.correct(pending)

    def drop(self) -> None:
        """Wait for what is under way and forget it: other values replace the parameters."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # The world may have ended.
        with contextlib.suppress(HorovodInternalError):
            self.receive(pending)

    def make_equal(self) -> None:
        """Give all parameters the average of all ranks. A collective."""
        self.settle()
        self.average_all()

    def settle(self) -> None:
        """Apply what is under way. Not a collective."""
        self.finish()

    def average_all(self) -> None:
        """Replace all parameters by the average of all ranks, with nothing under way."""
        for part in range(self.parts):
            pending = self.send(part)
            if pending is not None:
                self.replace(pending)

    @abstractmethod
    def send(self, part: int) -> Any:
        """Start averaging a part; None if it has no elements."""

    @abstractmethod
    def receive(self, pending: Any) -> Any:
        """Wait, and return the average of what send() sent."""

    @abstractmethod
    def correct(self, pending: Any) -> None:
        """Receive, and add what the average differs by from what was sent."""

    @abstractmethod
    def replace(self, pending: Any) -> None:
        """Receive, and give the parameters the bits of the average."""
