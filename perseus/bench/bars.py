"""The bars that Perseus must meet: the suite of jobs that `make bench` runs, and the verdicts.

Pure functions and values, thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.bench.launch import Job
from perseus.bench.plan import PERSEUS, Plan
from perseus.bench.record import Record
from perseus.bench.sizes import show_bytes, show_seconds

_GLOO = "torch-gloo"
_TCP = {"PERSEUS_TRANSPORT": "tcp"}


def suite() -> list[Job]:
    """Return the jobs that measure every bar and two models, in about 3 minutes on two cores."""
    peers = [_GLOO]
    return [
        Job(Plan(["memory", "latency", "tensors"], peers, seconds=6.0)),
        Job(Plan(["memory"], peers, seconds=8.0), ranks=4),
        Job(Plan(["network"], peers, seconds=5.0), environment=_TCP),
        Job(Plan(["network"], peers, seconds=14.0), hosts=2, rate="1gbit"),
        Job(Plan(["gradients"], peers, models=["resnet50", "bert-base"], seconds=5.0)),
        Job(Plan(["gradients"], peers, models=["resnet50"], seconds=8.0), hosts=2, rate="1gbit"),
    ]


@dataclass(frozen=True)
class Verdict:
    """A row of the table of bars.

    met: whether the medians meet the bar; None = not measured. fastest: the result with each
    contender's fastest repetition.
    """

    what: str
    ours: str
    other: str
    result: str
    fastest: str
    bar: str
    met: bool | None


@dataclass(frozen=True)
class Bar:
    """The bar for one case, either absolute or relative to the fastest of some contenders.

    kind: how `limit` is meant. "slower" is at most `limit` times the other's time; "faster" is at
        least `limit` times as fast; "share" is at least this fraction of the other's speed;
        "seconds" and "staging" are absolute upper bounds, in seconds and bytes.
    against: the peers to compare with; () for an absolute bar.
    goal: a stricter limit, which is not required yet.
    """

    what: str
    case: str
    kind: str
    limit: float
    against: tuple[str, ...] = ()
    goal: float | None = None
    ranks: int = 2
    hosts: int = 1

    def command(self) -> str:
        """Return the command that measures this case alone."""
        words = ["perseus-bench", self.case]
        if self.case == "network" and self.hosts == 1:
            words.insert(0, "PERSEUS_TRANSPORT=tcp")
        if self.ranks != 2:
            words += ["-np", str(self.ranks)]
        if self.hosts > 1:
            words += ["--hosts", str(self.hosts), "--rate", "1gbit"]
        return " ".join(words)

    def judge(self, records: Sequence[Record]) -> Verdict:
        """Return the verdict for the records. A wrong result never meets a bar."""
        ours = self._find(records, (PERSEUS,))
        other = self._find(records, self.against) if self.against else None
        if ours is None or (self.against and other is None):
            return Verdict(self.what, "", "", "not measured", "", self._bar(), None)
        value = self._value(ours, other)
        met = value <= self.limit if self._less_is_better() else value >= self.limit
        valid = ours.verified and (other is None or other.verified)
        return Verdict(
            self.what,
            "" if self.kind == "staging" else show_seconds(ours.median_s),
            ""
            if other is None
            else f"{_NAMES.get(other.peer, other.peer)} {show_seconds(other.median_s)}",
            self._show(value) if valid else f"invalid: {ours.note or (other and other.note)}",
            "" if self.kind == "staging" else self._show(self._least(ours, other)),
            self._bar(),
            met and valid,
        )

    def _find(self, records: Sequence[Record], peers: tuple[str, ...]) -> Record | None:
        """Return the newest record of this case for the fastest of the peers; None without any."""
        found = {
            record.peer: record
            for record in records
            if record.peer in peers
            and record.codec == "none"
            and (record.case, record.ranks, record.hosts) == (self.case, self.ranks, self.hosts)
        }
        return min(found.values(), key=lambda record: record.median_s, default=None)

    def _value(self, ours: Record, other: Record | None) -> float:
        if self.kind == "seconds":
            return ours.median_s
        if self.kind == "staging":
            return float(ours.staging_bytes or 0)
        assert other is not None
        assert other.vs_perseus is not None
        return 1 / other.vs_perseus if self.kind == "slower" else other.vs_perseus

    def _least(self, ours: Record, other: Record | None) -> float:
        """Return the value for the fastest repetitions, which other processes disturb least."""
        if other is None:
            return ours.min_s
        ratio = other.min_s / ours.min_s
        return 1 / ratio if self.kind == "slower" else ratio

    def _less_is_better(self) -> bool:
        return self.kind in ("slower", "seconds", "staging")

    def _show(self, value: float) -> str:
        shown = {
            "slower": f"{value:.2f} × its time",
            "faster": f"{value:.1f} × as fast" if value >= 2 else f"{value:.2f} × as fast",
            "share": f"{100 * value:.1f} % of its speed",
            "seconds": show_seconds(value),
            "staging": show_bytes(round(value)),
        }
        return shown[self.kind]

    def _bar(self) -> str:
        def text(value: float) -> str:
            if self.kind == "seconds":
                return show_seconds(value)
            if self.kind == "staging":
                return show_bytes(round(value))
            return f"{100 * value:.1f} %" if self.kind == "share" else f"{value:g} ×"

        sign = "≤" if self._less_is_better() else "≥"
        return f"{sign} {text(self.limit)}" + (f" (goal {text(self.goal)})" if self.goal else "")


_COPIES = ("memcpy", "memcpy-unaligned")
BARS = [
    Bar("64 MiB allreduce, 2 ranks, shared memory", "memory", "slower", 1.6, _COPIES, 1.4),
    Bar("the same", "memory", "faster", 7, (_GLOO,)),
    Bar("the same: memory held beyond the tensors", "memory", "staging", 64 << 20),
    Bar("4-byte blocking allreduce from Python, 2 ranks", "latency", "seconds", 30e-6, (), 15e-6),
    Bar("the same", "latency", "faster", 5, (_GLOO,)),
    Bar("500 tensors × 1000 floats, 2 ranks", "tensors", "slower", 1.8, ("cat-and-copy",), 1.2),
    Bar("the same", "tensors", "faster", 1, (_GLOO,)),
    Bar("64 MiB allreduce, 4 ranks, shared memory", "memory", "faster", 3, (_GLOO,), ranks=4),
    Bar("64 MiB allreduce, 2 ranks, TCP over loopback", "network", "faster", 1, (_GLOO,)),
    Bar("64 MiB allreduce, 2 hosts, 1 Gbit/s", "network", "share", 0.985, ("raw-tcp",), hosts=2),
    Bar("the same", "network", "faster", 1, (_GLOO,), hosts=2),
]

_NAMES = {
    _GLOO: "torch gloo",
    "memcpy": "memcpy",
    "memcpy-unaligned": "memcpy",
    "cat-and-copy": "torch.cat and copying back",
    "raw-tcp": "raw TCP exchange",
}
