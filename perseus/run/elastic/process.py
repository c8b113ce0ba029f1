"""What an elastic job's launcher knows about one of its processes. Single-threaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf

from perseus.run.bootstrap.words import Join
from perseus.run.elastic.cohort import Cohort
from perseus.run.elastic.slots import Place
from perseus.run.link import HostLink


@dataclass
class Process:
    """A process from its start to its end. Its number is never used twice; its rank may change."""

    number: int
    place: Place
    host: HostLink
    epoch: int = -1  # of the last world that it was in
    rank: int = -1  # in that world
    request: Join | None = None  # to join the next world
    has_begun: bool = False  # and met the others there
    had_state: bool = False  # when it asked for that world
    is_new: bool = True  # and has not met the others of any world
    failed_starts: int = 0  # in a row, by errors of its own
    dismissed: bool = False  # told to leave
    end_at: float = inf  # when it is ended, since it has been dismissed
    heard_at: float = field(default_factory=time.monotonic)
    ticks: int | None = None  # of the processor, that it had used when it was last asked
    is_stopped: bool = False
    is_killed: bool = False
    feed: int | None = None  # the number of that in which it was to be fed
    fed: bool = False  # and has got something
    first_local_rank: int | None = None  # in the first world that it was in
    loop: int = 0  # of elastic training: so many it has begun
    unread: bytes = b""
    cohort: Cohort = field(default_factory=lambda: Cohort(time.monotonic()))

    @property
    def has_state(self) -> bool:
        """Whether it asks to join with the training's state, as far as its script says."""
        return self.request is not None and self.request.state is not False

    @property
    def commits(self) -> int:
        """How many have gone into the training's state with which it asks to join."""
        return 0 if self.request is None else self.request.commits

    @property
    def name(self) -> str:
        rank = f"rank {self.rank}" if self.epoch >= 0 else f"process {self.number}"
        return f"{rank} on {self.place[0]}"

    def kill(self) -> None:
        """Have its agent kill it."""
        self.is_killed = True
        self.host.send(b"KILL %d\n" % self.number)


def what_happened(status: int) -> str:
    """Return in words how a process ended, for the rest of a sentence."""
    if status == 0:
        return "ended before it asked to join a world"
    return f"failed with exit code {status}"
