"""Times contenders alternately in the same processes. One thread per rank; all ranks call alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_WARM_UPS = 2
_FEWEST, _MOST = 5, 400


class World(Protocol):
    """What the ranks need to measure together. Every method is a collective."""

    size: int
    hosts: int
    counts_wire: bool  # this rank reads its host's interface counters

    def barrier(self) -> None:
        """Return once every rank is here."""

    def agree(self, value: float) -> float:
        """Rank 0's value."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values (equally many), by rank."""


@dataclass
class Contender:
    """Something to time. `prepare` and `check` are outside the clock.

    run(i): the i-th of `calls` calls of a repetition, each timed by itself; `warm` more come first.
    The repetition's time is the median of its calls. conclude() verifies once more, at the end.
    payload: bytes that one call must send from each host, None where that is not known; where it
    may be more, payload_most. codec: how gradients travel, see Record.
    """

    name: str
    operation: str
    run: Callable[[int], None]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], bool] = lambda: True
    calls: int = 1
    warm: int = 0
    payload: int | None = None
    payload_most: int | None = None
    codec: str = "none"
    conclude: Callable[[], bool] = lambda: True
    warm_ups: int = _WARM_UPS

    @property
    def key(self) -> str:
        """What tells it from the others of its subject."""
        return self.name if self.codec == "none" else f"{self.name} {self.codec}"


@dataclass
class Samples:
    """What came out. seconds: of the slowest rank, by repetition. wire_bytes: a call's average."""

    seconds: list[float] = field(default_factory=list)
    verified: bool = True
    wire_bytes: int | None = None


def measure(world: World, contenders: Sequence[Contender], budget: float) -> dict[str, Samples]:
    """Time all contenders, one repetition of each in turn, for about `budget` seconds in all.

    Returns what came out by Contender.key.

    Every repetition starts behind a barrier and its result is verified. Who begins a round changes
    from round to round. At least 5 and at most 400 repetitions, the same number for everybody.
    """
    runs = [_Run(world, contender) for contender in contenders]
    for run in runs:
        for _ in range(run.contender.warm_ups):
            run.repeat()
    started = time.perf_counter()
    for run in runs:
        run.start()
        run.repeat()
    spent = time.perf_counter() - started
    rounds = int(world.agree(min(_MOST, max(_FEWEST, budget / max(spent, 1e-6)))))
    for round_number in range(1, rounds):
        first = round_number % len(runs)
        for run in runs[first:] + runs[:first]:
            run.repeat()
    return {run.contender.key: run.finish() for run in runs}


class _Run:
    """One contender's repetitions on this rank."""

    def __init__(self, world: World, contender: Contender) -> None:
        self.contender = contender
        self._world = world
        self._verified = True
        self.start()

    def start(self) -> None:
        """Forget the measurements, but not whether the results were right."""
        self._seconds: list[float] = []
        self._sent = 0

    def repeat(self) -> None:
        """Prepare, wait for all ranks, run under the clock, verify."""
        contender, world = self.contender, self._world
        contender.prepare()
        world.barrier()
        sent = sent_bytes() if world.counts_wire else 0
        times = []
        for i in range(contender.warm + contender.calls):
            begin = time.perf_counter_ns()
            contender.run(i)
            times.append(time.perf_counter_ns() - begin)
        if world.hosts > 1:
            world.barrier()
            self._sent += sent_bytes() - sent if world.counts_wire else 0
        self._seconds.append(statistics.median(times[contender.warm :]) / 1e9)
        self._verified = contender.check() and self._verified

    def finish(self) -> Samples:
        """All ranks' repetitions made one, verified a last time."""
        self._verified = self.contender.conclude() and self._verified
        rows = self._world.gather([*self._seconds, float(self._verified), float(self._sent)])
        count = len(self._seconds)
        samples = Samples([max(row[i] for row in rows) for i in range(count)])
        samples.verified = all(row[count] == 1.0 for row in rows)
        if self._world.hosts > 1:
            calls = count * (self.contender.warm + self.contender.calls)
            samples.wire_bytes = round(max(row[count + 1] for row in rows) / calls)
        return samples


def sent_bytes(table: Path = Path("/proc/net/dev")) -> int:
    """Bytes that this host's interfaces have sent so far, loopback aside."""
    total = 0
    for line in table.read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total
