"""Analyses the traces of a job: overlap, bandwidth, slow tensors and waiting. Times in seconds.

Pure functions, thread-safe.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from perseus.report.trace import Bucket, Operation, Trace

Interval = tuple[float, float]

# Seconds: ranks that submit an operation within this time count as simultaneous.
TOGETHER = 50e-6

_RESOLUTION = 1e-6  # of times in a timeline, in seconds: what takes no time took less


# ---- intervals ----


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Return how many seconds between begin and end the disjoint intervals cover."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in intervals)


# ---- overlap of backward and communication ----


@dataclass(frozen=True)
class Step:
    """One training step of one rank: from its first gradient to its last result."""

    begin: float  # when the first gradient was submitted
    backward_end: float  # when the last gradient was submitted
    end: float  # when the last result was available
    hidden: float  # seconds before backward_end with bytes on the wire
    exposed: float  # seconds after backward_end with bytes on the wire

    @property
    def waiting(self) -> float:
        """Seconds after backward_end without bytes on the wire, because other ranks were late."""
        return max(0.0, self.end - self.backward_end - self.exposed)


def steps(trace: Trace) -> list[Step]:
    """Return the training steps in a trace; [] if no gradient occurs twice.

    A step ends when the name of one of its gradients occurs again. Reductions count as gradients if
    they occur at least half as often as the most frequent one, which excludes those that occur once
    or once per epoch.
    """
    reductions = [o for o in trace.operations if o.ok and o.kind == "ALLREDUCE"]
    counts = Counter((o.process_set, o.name) for o in reductions)
    often = max(counts.values(), default=0)
    if often < 2:
        return []
    groups: list[list[Operation]] = []
    seen: set[tuple[int, str]] = set()
    for operation in sorted(reductions, key=lambda o: o.submitted):
        key = (operation.process_set, operation.name)
        if 2 * counts[key] < often:
            continue
        if key in seen or not groups:
            groups.append([])
            seen.clear()
        seen.add(key)
        groups[-1].append(operation)
    wire = union((bucket.begin, bucket.end) for bucket in trace.buckets)
    found, next_wire = [], 0
    for group in groups:
        begin, backward_end = group[0].submitted, group[-1].submitted
        end = max(operation.ended for operation in group)
        while next_wire < len(wire) and wire[next_wire][1] <= begin:
            next_wire += 1
        near = []
        for interval in wire[next_wire:]:
            if interval[0] >= end:
                break
            near.append(interval)
        hidden = length(near, begin, backward_end)
        found.append(Step(begin, backward_end, end, hidden, length(near, backward_end, end)))
    return found


def hidden_share(found: Sequence[Step]) -> float | None:
    """Return the fraction of the time on the wire that is hidden by backward.

    Returns None if nothing was on the wire.
    """
    hidden = sum(step.hidden for step in found)
    total = hidden + sum(step.exposed for step in found)
    return hidden / total if total > 0 else None


# ---- bandwidth ----


def bus_bytes(bucket: Bucket) -> float:
    """Return the bytes that an ideal algorithm moves per rank.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    n = bucket.ranks
    factor = {
        "ALLREDUCE": 2 * (n - 1) / n,
        "REDUCESCATTER": (n - 1) / n,
        "ALLGATHER": n - 1,
        "ALLTOALL": (n - 1) / n,
        "BROADCAST": 1 if n > 1 else 0,
    }
    return bucket.bytes * factor.get(bucket.kind, 0)


def bandwidth(buckets: Sequence[Bucket], begin: float, end: float, bins: int) -> list[float]:
    """Return the mean bus bandwidth, in bytes per second, of `bins` equal parts of begin..end."""
    width = max(end - begin, _RESOLUTION) / bins
    moved = [0.0] * bins
    for bucket in buckets:
        first = max(0, min(bins - 1, int((bucket.begin - begin) / width)))
        last = max(first, min(bins - 1, int((bucket.end - begin) / width)))
        duration = bucket.end - bucket.begin
        for index in range(first, last + 1):
            edge = begin + index * width
            share = length([(bucket.begin, bucket.end)], edge, edge + width) / (duration or 1)
            moved[index] += bus_bytes(bucket) * (share if last > first else 1)
    return [amount / width for amount in moved]


def wire_bandwidth(trace: Trace) -> float:
    """Return bus bytes per second of the time in which anything was on the wire; 0 if nothing."""
    busy = sum(end - begin for begin, end in union((b.begin, b.end) for b in trace.buckets))
    return sum(map(bus_bytes, trace.buckets)) / busy if busy > 0 else 0.0


# ---- tensors ----


@dataclass
class Tensor:
    """The operations with one name, on all ranks; times are sums over these operations."""

    name: str
    kind: str
    bytes: int
    count: int = 0
    negotiating: float = 0.0  # after the rank's own submission, before that of the last rank
    queued: float = 0.0  # after all ranks have submitted it, before its bucket begins
    moving: float = 0.0  # while its bucket is on the wire

    @property
    def total(self) -> float:
        """Seconds in all of these phases."""
        return self.negotiating + self.queued + self.moving


def slowest(traces: Sequence[Trace], most: int) -> list[Tensor]:
    """Return the `most` names whose operations took longest in total, the longest first."""
    tensors: dict[tuple[int, str, str], Tensor] = {}
    for trace in traces:
        for o in trace.operations:
            key = (o.process_set, o.name, o.kind)
            tensor = tensors.setdefault(key, Tensor(o.name, o.kind, o.bytes))
            tensor.count += 1
            tensor.negotiating += o.agreed - o.submitted
            tensor.queued += o.queued
            tensor.moving += o.moving
    return sorted(tensors.values(), key=lambda tensor: -tensor.total)[:most]


# ---- which rank waited for which ----


@dataclass
class Waiting:
    """How long ranks waited for each other, after they had submitted an operation themselves.

    operations: the number of operations that at least two of the ranks have recorded.
    last: for each rank, to how many of them it was clearly the last to submit.
    waited: waited[r][s] is the number of seconds that rank r waited for rank s.
    """

    ranks: list[int]
    operations: int = 0
    last: dict[int, int] = field(default_factory=dict)
    waited: dict[int, dict[int, float]] = field(default_factory=dict)


def waiting(traces: Sequence[Trace]) -> Waiting:
    """Find out which rank was last, from how long each rank waited: the last one waits least.

    Clocks of different ranks are not compared. Operations are matched by the number of their
    bucket, which is equal on all ranks, so the recordings need not begin at the same time.
    """
    result = Waiting([trace.rank for trace in traces])
    result.last = dict.fromkeys(result.ranks, 0)
    matched: dict[tuple[object, ...], dict[int, Operation]] = defaultdict(dict)
    for trace in traces:
        times: Counter[tuple[object, ...]] = Counter()
        for o in trace.operations:
            if o.bucket < 0:
                continue
            key = (o.process_set, o.name, o.bucket)
            times[key] += 1
            again = (*key, times[key])
            matched[again][trace.rank] = o
    intervals: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for by_rank in matched.values():
        if len(by_rank) < 2:
            continue
        result.operations += 1
        waits = {rank: o.agreed - o.submitted for rank, o in by_rank.items()}
        last, second, *_ = sorted(waits, key=lambda rank: waits[rank])
        if waits[second] - waits[last] < TOGETHER:
            continue
        result.last[last] += 1
        for rank, o in by_rank.items():
            if rank != last:
                intervals[rank, last].append((o.submitted, o.agreed - waits[last]))
    for rank in result.ranks:
        result.waited[rank] = {
            other: sum(end - begin for begin, end in union(intervals[rank, other]))
            for other in result.ranks
            if (rank, other) in intervals
        }
    return result
