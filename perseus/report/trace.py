"""Reads timelines in the format of the core (common/observe/trace_format.cc). Plain values.

Times are seconds since the epoch by the clock of the rank that wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STREAMS_PID = 1
_SET_SUFFIX = " (process set "


@dataclass
class Operation:
    """One request of one rank, after all ranks have submitted it."""

    name: str
    kind: str  # such as "ALLREDUCE"
    process_set: int
    submitted: float
    agreed: float  # when all ranks had submitted it
    ended: float
    bytes: int
    ok: bool
    queued: float = 0.0  # seconds between `agreed` and the start of its bucket
    moving: float = 0.0  # seconds in which its bucket was on the wire
    bucket: int = -1  # the number of its first bucket, equal on all ranks


@dataclass(frozen=True)
class Bucket:
    """One fused execution on one rank, from its first byte to its last."""

    kind: str
    bytes: int  # of this rank's tensors
    ranks: int
    transport: str  # "shm", "tcp", "shm+tcp", "mem", "local"
    begin: float
    end: float


@dataclass
class Trace:
    """The recording of one rank."""

    path: Path
    rank: int
    size: int
    world: str = ""  # what the traces of a world have in common; "" = not recorded
    operations: list[Operation] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    never_agreed: int = 0  # number of requests that failed before all ranks had submitted them
    dropped: int = 0  # number of records that could not be written fast enough

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end of the recording; (0, 0) if it is empty."""
        if not self.operations:
            return 0.0, 0.0
        return (
            min(operation.submitted for operation in self.operations),
            max(operation.ended for operation in self.operations),
        )


def read_all(paths: Sequence[Path]) -> list[Trace]:
    """Read the traces of one job; return them ordered by rank.

    Raises ValueError, which names the file, for a file that is not a timeline of Perseus or belongs
    to another job. Two jobs whose secret the user has given cannot be told apart.
    """
    traces: dict[int, Trace] = {}
    for path in paths:
        trace = read(path)
        first = next(iter(traces.values()), trace)
        if trace.rank in traces:
            raise ValueError(
                f"{path} and {traces[trace.rank].path} are both traces of rank {trace.rank}"
            )
        if trace.size != first.size:
            raise ValueError(
                f"{path} is of a job with {trace.size} ranks, {first.path} of one with {first.size}"
            )
        if trace.world and first.world and trace.world != first.world:
            raise ValueError(
                f"{path} and {first.path} are of different jobs, or of different worlds of an "
                "elastic job: remove older traces before a job writes new ones"
            )
        traces[trace.rank] = trace
    return [traces[rank] for rank in sorted(traces)]


def read(path: Path) -> Trace:
    """Read one trace.

    Raises ValueError if the file is not a timeline of Perseus, OSError if it cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        events = json.loads(text, parse_constant=_no_number)
        job = events[0]["args"]
        trace = Trace(path, int(job["rank"]), int(job["size"]), str(job.get("world", "")))
        reader = _Reader(trace, int(job["start_time_since_epoch_in_micros"]))
        for event in events:
            reader.take(event)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise ValueError(f"{path} is not a timeline of Perseus") from None
    return trace


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


class _Reader:
    """Assembles operations from the events of each row: NEGOTIATE_X, X, then the phases of X."""

    def __init__(self, trace: Trace, zero_us: int) -> None:
        self._trace = trace
        self._zero_us = zero_us
        self._names: dict[int, str] = {}
        self._submitted: dict[int, float] = {}
        self._latest: dict[int, Operation] = {}

    def take(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            self._names[event["pid"]] = event["args"]["name"].rsplit(_SET_SUFFIX, 1)[0]
        elif event["name"] == "DROPPED_RECORDS":
            self._trace.dropped += int(event["args"]["count"])
        elif event["ph"] == "X":
            begin = (self._zero_us + float(event["ts"])) / 1e6
            end = begin + max(0.0, float(event["dur"])) / 1e6
            if not math.isfinite(end):
                raise ValueError("no finite time")
            self._take_span(event, begin, end)

    def _take_span(self, event: dict[str, Any], begin: float, end: float) -> None:
        row, name, facts = event["pid"], event["name"], event["args"]
        if row == _STREAMS_PID:
            self._trace.buckets.append(
                Bucket(
                    kind=str(facts["kind"]),
                    bytes=int(facts["bytes"]),
                    ranks=int(facts["ranks"]),
                    transport=str(facts["transport"]),
                    begin=begin,
                    end=end,
                )
            )
        elif name.startswith("NEGOTIATE_"):
            self._submitted[row] = begin
            self._trace.never_agreed += facts.get("outcome") == "failed"
        elif name == "QUEUE":
            self._latest[row].queued += end - begin
        elif "bucket" in facts:
            operation = self._latest[row]
            operation.moving += end - begin
            if operation.bucket < 0:
                operation.bucket = int(facts["bucket"])
        else:
            joined = "joined" in facts  # this rank has joined, so only other ranks submitted it
            operation = Operation(
                name=str(facts.get("name", self._names[row])),
                kind=name,
                process_set=int(facts["process_set"]),
                submitted=begin if joined else self._submitted[row],
                agreed=begin,
                ended=end,
                bytes=int(facts["bytes"]),
                ok=facts["outcome"] == "done",
            )
            self._latest[row] = operation
            if not joined:
                self._trace.operations.append(operation)
