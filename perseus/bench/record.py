"""One measurement as a JSON record, and the arithmetic of bandwidths. Pure, thread-safe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# What a rank must at least move, in units of the operation's size. Source: nccl-tests,
# doc/PERFORMANCE.md. The size is the buffer's; the larger one's where input and output differ.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}

# Below, acknowledgements and keep-alives outweigh the data; above, only headers add to it.
_COUNTERS_FROM_BYTES = 1 << 20
# Headers are 4.6 % of packets of 1500 bytes; the short queues of slow links lose some packets.
_HEADERS_AND_LOSSES = 1.10
_OTHER_TRAFFIC = 64 << 10


def bus_factor(operation: str, ranks: int) -> float:
    """busbw / algbw of an operation: comparable with the hardware's speed for any number of ranks.

    0 for operations without one (copies and the like).
    """
    factor = _BUS_FACTORS.get(operation)
    return 0.0 if factor is None or ranks < 2 else factor(ranks)


@dataclass
class Record:
    """Times of one contender in one case. Seconds, bytes, GB/s = 1e9 bytes per second.

    A repetition's time is that of the slowest rank. vs_perseus is the median over repetitions of
    this contender's time divided by Perseus' time in the same repetition: 2 = Perseus is twice as
    fast. wire_bytes: what one operation sent through the busiest host's interfaces, by their own
    counters; None on a single host. wire_bytes_expected: what it must send at least; at most
    wire_bytes_limit, where they differ. codec: how gradients travelled, as perseus-bench --codec
    names it. images_per_s: of all ranks together, in training.
    """

    case: str
    peer: str
    operation: str
    ranks: int
    hosts: int
    bytes: int
    median_s: float
    min_s: float
    n: int
    verified: bool
    rate_gbit: float | None = None
    links: int = 1
    wire_bytes: int | None = None
    wire_bytes_expected: int | None = None
    wire_bytes_limit: int | None = None
    codec: str = "none"
    settings: dict[str, str] = field(default_factory=dict)
    tensors: int = 1
    algbw_GBps: float = 0.0  # noqa: N815 - the unit's own spelling
    busbw_GBps: float = 0.0  # noqa: N815
    vs_perseus: float | None = None
    images_per_s: float | None = None
    staging_bytes: int | None = None
    load1: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if self.median_s > 0:
            self.algbw_GBps = self.bytes / self.median_s / 1e9
            self.busbw_GBps = self.algbw_GBps * bus_factor(self.operation, self.ranks)

    @property
    def contender(self) -> str:
        """Who was measured, with the codec where there is one."""
        return self.peer if self.codec == "none" else f"{self.peer} {self.codec}"

    def to_json(self) -> str:
        """The record as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Record:
        """The record that to_json wrote; TypeError for a field that is not known."""
        fields: dict[str, Any] = json.loads(line)
        return Record(**fields)


def counters_match(counted: int | None, payload: int | None, most: int | None = None) -> bool:
    """Whether the bytes sent are those that had to be, headers and losses on top, or unknown.

    most: the payload's upper end, where it is not one number.
    """
    if counted is None or payload is None:
        return True
    limit = payload if most is None else most
    if limit < _COUNTERS_FROM_BYTES:
        return True
    return payload <= counted <= _HEADERS_AND_LOSSES * limit + _OTHER_TRAFFIC


def pairwise_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """The median of times[i] / reference[i]: what disturbs both of a repetition cancels out."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))
