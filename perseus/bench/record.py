"""The record of one measurement, and the arithmetic of bandwidths. Pure, thread-safe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# The bytes that a rank must at least move, divided by the operation's size. Source: nccl-tests,
# doc/PERFORMANCE.md. The size is that of the larger buffer if input and output differ.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}

# Below this size, acknowledgements and heartbeats outweigh the data.
_COUNTERS_FROM_BYTES = 1 << 20
# Headers add 4.6 % to packets of 1500 bytes, and the short queues of slow links lose some packets.
_HEADERS_AND_LOSSES = 1.10
_OTHER_TRAFFIC = 64 << 10


def bus_factor(operation: str, ranks: int) -> float:
    """Return busbw / algbw of an operation, where busbw is comparable with the hardware's speed.

    Returns 0 for operations that have none, such as copies, and for a single rank.
    """
    factor = _BUS_FACTORS.get(operation)
    return 0.0 if factor is None or ranks < 2 else factor(ranks)


@dataclass
class Record:
    """The times of one contender in one case. 1 GB/s is 1e9 bytes per second.

    median_s, min_s, n: over repetitions; a repetition's time is that of the slowest rank.
    vs_perseus: the median over repetitions of this contender's time divided by Perseus' time in the
        same repetition; 2 means that Perseus is twice as fast.
    wire_bytes: bytes that one operation sent through the interfaces of the busiest host, according
        to their counters; None on a single host.
    wire_bytes_expected, wire_bytes_limit: the least and the most bytes that it may send.
    codec: the codec of the gradients, by its name in perseus-bench --codec.
    images_per_s: of all ranks together, in training.
    staging_bytes: memory that Perseus holds beyond the tensors.
    load1: the load average of one minute.
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
        """The name of the peer, followed by the codec if there is one."""
        return self.peer if self.codec == "none" else f"{self.peer} {self.codec}"

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Record:
        """Return the record that to_json() wrote. Raises TypeError for an unknown field."""
        fields: dict[str, Any] = json.loads(line)
        return Record(**fields)


def counters_match(counted: int | None, payload: int | None, most: int | None = None) -> bool:
    """Return whether the bytes that were sent match the payload plus headers and losses.

    Returns true as well if one of them is unknown, or if the payload is too small to tell.

    most: the largest possible payload; None = `payload`.
    """
    if counted is None or payload is None:
        return True
    limit = payload if most is None else most
    if limit < _COUNTERS_FROM_BYTES:
        return True
    return payload <= counted <= _HEADERS_AND_LOSSES * limit + _OTHER_TRAFFIC


def pairwise_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of times[i] / reference[i], in which a disturbance of both cancels out."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))
