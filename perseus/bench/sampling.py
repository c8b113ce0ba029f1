"""Times contenders alternately in the same processes.

One thread per rank; the functions are collectives, which all ranks call in the same order.
"""

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
    """The ranks that measure together. Every method is a collective."""

    size: int
    hosts: int
    counts_wire: bool  # whether this rank reads its host's interface counters

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def agree(self, value: float) -> float:
        """Return rank 0's value."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, ordered by rank. All ranks pass equally many."""


@dataclass
class Contender:
    """An operation to time. A repetition calls prepare(), then run() several times, then check().

    run: run(i) is the i-th call of a repetition, which times each of its `calls` calls, after
        `warm` calls that are not timed. The repetition's time is the median of its calls.
    prepare, check: run outside of the timing; check() returns whether the results are right.
    conclude: returns whether everything was right, after the last repetition.
    payload: bytes that one call must send from each host; None if that is unknown.
    payload_most: the most bytes that it may send, if that differs.
    codec: the codec of the gradients; see Record.
    warm_ups: repetitions that do not count.
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
        """The name of the contender, unique among those of its subject."""
        return self.name if self.codec == "none" else f"{self.name} {self.codec}"


@dataclass
class Samples:
    """The measurements of one contender.

    seconds: the time of the slowest rank in each repetition. verified: whether all results were
    right. wire_bytes: the average per call of the host that sent most; None on a single host.
    """

    seconds: list[float] = field(default_factory=list)
    verified: bool = True
    wire_bytes: int | None = None


def measure(world: World, contenders: Sequence[Contender], budget: float) -> dict[str, Samples]:
    """Time all contenders, one repetition of each in turn, for about `budget` seconds in total.

    Every repetition starts after a barrier, and its result is verified. Each round begins with
    another contender. There are 5 to 400 rounds, so all contenders have equally many repetitions.

    Returns the samples by Contender.key.
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
    """The repetitions of one contender on this rank."""

    def __init__(self, world: World, contender: Contender) -> None:
        self.contender = contender
        self._world = world
        self._verified = True
        self.start()

    def start(self) -> None:
        """Drop the measurements, but not whether the results were right."""
        self._seconds: list[float] = []
        self._sent = 0

    def repeat(self) -> None:
        """Prepare, wait for all ranks, run and time the calls, verify."""
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
        """Verify a last time and combine the measurements of all ranks."""
        self._verified = self.contender.conclude() and self._verified
        rows = self._world.gather([*self._seconds, float(self._verified), float(self._sent)])
        count = len(self._seconds)
        samples = Samples([max(row[i] for row in rows) for i in range(count)])
        samples.verified = all(row[count] == 1.0 for row in rows)
        if self._world.hosts > 1:
            calls = count * (self.contender.warm + self.contender.calls)
            samples.wire_bytes = round(max(row[count + 1] for row in rows) / calls)
        return samples


def sent_bytes(
    table: Path = Path("/proc/net/dev"), interfaces: Path = Path("/sys/class/net")
) -> int:
    """Return the bytes that this host's interfaces have sent so far, without loopback.

    What a bond, a VLAN or a bridge sends, the devices below it send and count again. So interfaces
    with a device count alone, unless none has one, as in containers and virtual hosts.
    """
    sent = {}
    for line in table.read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            sent[name.strip()] = int(counters.split()[8])
    devices = [name for name in sent if (interfaces / name / "device").exists()]
    # A process in a network of its own may see /sys of another one.
    is_of_this_network = all((interfaces / name).exists() for name in sent)
    return sum(sent[name] for name in (devices if devices and is_of_this_network else sent))
