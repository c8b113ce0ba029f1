"""The bars that Perseus must meet: the suite of jobs that `make bench` runs, and the verdicts.

Pure functions and values, thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perseus.bench.launch import Job
from perseus.bench.plan import (
    DDP,
    FP16_HOOK,
    GROUP,
    NO_EXCHANGE,
    PERSEUS,
    POWERSGD_HOOK,
    Plan,
)
from perseus.bench.record import Record
from perseus.bench.sizes import show_bytes, show_seconds

_GLOO = "torch-gloo"
_TCP = {"PERSEUS_TRANSPORT": "tcp"}
_RATES = ("1gbit", "300mbit")
_DEFAULT, _AUTO = f"{PERSEUS} default", f"{PERSEUS} auto"  # contenders with codecs


def suite() -> list[Job]:
    """Return the jobs that measure every bar and two models, in about 20 minutes on two cores."""
    peers = [_GLOO]
    codecs = ["default", "int8", "int4", "int2", "auto"]
    trained = Plan(["ddp-training"], peers, models=["resnet50"], codecs=codecs, seconds=240.0)
    return [
        Job(Plan(["memory", "latency", "tensors"], peers, seconds=6.0)),
        Job(Plan(["memory"], peers, seconds=8.0), ranks=4),
        Job(Plan(["network"], peers, seconds=5.0), environment=_TCP),
        Job(Plan(["network"], peers, seconds=14.0), hosts=2, rate="1gbit"),
        Job(Plan(["gradients"], peers, models=["resnet50", "bert-base"], seconds=5.0)),
        Job(Plan(["gradients"], peers, models=["resnet50"], seconds=8.0), hosts=2, rate="1gbit"),
        Job(Plan(["ddp"], peers, seconds=15.0)),
        Job(Plan(["ddp-training"], peers, models=["resnet50"], seconds=60.0), timeout=1800.0),
        *(Job(trained, hosts=2, rate=rate, timeout=3600.0) for rate in _RATES),
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
    ours: the contender that is held to it, with its codec if it has one.
    beyond: a contender whose time is no part of what is compared; None = all is.
    rate, bucket: of the network in Gbit/s and of DDP; None = any.
    """

    what: str
    case: str
    kind: str
    limit: float
    against: tuple[str, ...] = ()
    goal: float | None = None
    ranks: int = 2
    hosts: int = 1
    ours: str = PERSEUS
    beyond: str | None = None
    rate: float | None = None
    bucket: str | None = None

    def command(self) -> str:
        """Return the command that measures this case alone."""
        words = ["perseus-bench", self.case]
        if self.case == "network" and self.hosts == 1:
            words.insert(0, "PERSEUS_TRANSPORT=tcp")
        if self.ranks != 2:
            words += ["-np", str(self.ranks)]
        if self.bucket:
            words += ["--sizes", self.bucket.removesuffix("iB").replace(" ", "")]
        if self.case == "ddp-training":
            words += ["--model", "resnet50"]
            words += ["--codec", "default,int8,int4,int2,auto"] if self.hosts > 1 else []
        if self.hosts > 1:
            rate = 1.0 if self.rate is None else self.rate
            words += [
                "--hosts",
                str(self.hosts),
                "--rate",
                f"{1000 * rate:g}mbit".replace("1000mbit", "1gbit"),
            ]
        return " ".join(words)

    def judge(self, records: Sequence[Record]) -> Verdict:
        """Return the verdict for the records. A wrong result never meets a bar."""
        ours = self._find(records, (self.ours,))
        other = self._find(records, self.against) if self.against else None
        base = self._find(records, (self.beyond,)) if self.beyond else None
        if ours is None or (self.against and other is None) or (self.beyond and base is None):
            return Verdict(self.what, "", "", "not measured", "", self._bar(), None)
        value = self._value(ours, other, base)
        met = value <= self.limit if self._less_is_better() else value >= self.limit
        valid = ours.verified and (other is None or other.verified)
        return Verdict(
            self.what,
            "" if self.kind == "staging" else show_seconds(ours.median_s),
            ""
            if other is None
            else f"{_NAMES.get(other.contender, other.contender)} {show_seconds(other.median_s)}",
            self._show(value) if valid else f"invalid: {ours.note or (other and other.note)}",
            "" if self.kind == "staging" else self._show(self._least(ours, other, base)),
            self._bar(),
            met and valid,
        )

    def _find(self, records: Sequence[Record], contenders: tuple[str, ...]) -> Record | None:
        """Return this case's newest record of the fastest of the contenders; None without any."""
        found = {
            record.contender: record
            for record in records
            if record.contender in contenders
            and (record.case, record.ranks, record.hosts) == (self.case, self.ranks, self.hosts)
            and self.rate in (None, record.rate_gbit)
            and self.bucket in (None, record.settings.get("bucket"))
        }
        return min(found.values(), key=lambda record: record.median_s, default=None)

    def _value(self, ours: Record, other: Record | None, base: Record | None) -> float:
        if self.kind == "seconds":
            return ours.median_s
        if self.kind == "staging":
            return float(ours.staging_bytes or 0)
        assert other is not None
        assert other.vs_perseus is not None
        ratio = other.vs_perseus / (ours.vs_perseus or 1.0)
        if base is not None:
            ratio = _beyond(other.median_s, base.median_s) / _beyond(ours.median_s, base.median_s)
        return 1 / ratio if self.kind == "slower" else ratio

    def _least(self, ours: Record, other: Record | None, base: Record | None) -> float:
        """Return the value for the fastest repetitions, which other processes disturb least."""
        if other is None:
            return ours.min_s
        least = 0.0 if base is None else base.min_s
        ratio = _beyond(other.min_s, least) / _beyond(ours.min_s, least)
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


def _beyond(seconds: float, base: float) -> float:
    return max(seconds - base, 1e-9)


_COPIES = ("memcpy", "memcpy-unaligned")


def _between_hosts(rate: float) -> list[Bar]:
    place = f"DDP: step of ResNet-50, 2 hosts, {rate:g} Gbit/s"
    half = f"{DDP} {FP16_HOOK}"
    others = (DDP, half, f"{DDP} {POWERSGD_HOOK}")
    known: Any = {"hosts": 2, "rate": rate}
    return [
        Bar(f"{place}, default", "ddp-training", "faster", 1, (half,), ours=_DEFAULT, **known),
        Bar("the same with codec auto", "ddp-training", "faster", 1, others, ours=_AUTO, **known),
    ]


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
    Bar("4-byte dist.all_reduce from Python, 2 ranks", "latency", "seconds", 12e-6, ours=GROUP),
    Bar("the same", "latency", "faster", 5, (_GLOO,), ours=GROUP),
    Bar(
        "DDP: exchange of ResNet-50's gradients, 25 MiB buckets",
        "ddp",
        "faster",
        3,
        (DDP,),
        ours=_DEFAULT,
        beyond=NO_EXCHANGE,
        bucket="25 MiB",
    ),
    *(
        Bar(
            f"DDP: step of ResNet-50, {bucket} buckets",
            "ddp-training",
            "faster",
            1,
            (DDP,),
            ours=_DEFAULT,
            bucket=bucket,
        )
        for bucket in ("1 MiB", "25 MiB", "200 MiB")
    ),
    *(bar for rate in (1.0, 0.3) for bar in _between_hosts(rate)),
]

_NAMES = {
    _GLOO: "torch gloo",
    "memcpy": "memcpy",
    "memcpy-unaligned": "memcpy",
    "cat-and-copy": "torch.cat and copying back",
    "raw-tcp": "raw TCP exchange",
    DDP: "DDP on gloo",
    f"{DDP} {FP16_HOOK}": "DDP on gloo, fp16 hook",
    f"{DDP} {POWERSGD_HOOK}": "DDP on gloo, PowerSGD",
}
