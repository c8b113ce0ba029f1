"""Advises which settings to use, by the core's cost model with measured speeds for a model's step.

Pure functions, except measure() and compute_seconds(), which are collectives.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from perseus import basics
from perseus.bench.models import BATCH, CLASSES, MODELS, Shapes
from perseus.bench.plan import Plan
from perseus.bench.sizes import show_bytes, show_seconds
from perseus.compression import EXACT, FLOAT16, INT2, INT4, INT8

_BACKWARD = 2 / 3  # share of a step's computation: two matrix products for each one in forward
_ABOUT_AS_FAST = 0.05  # within this, the more accurate setting is best, as for the codec auto
_WARM_UPS, _TIMES = 1, 3
# Expected by docs/accuracy.md, whose rows are open as long as seeds are missing. What is worse is
# no advice; nor is it a matter of the optimizer, of which `auto` takes care.
EXACTLY, EQUIVALENT, WITH_SGD = "exact", "equivalent", "equivalent with SGD only"


class Speeds(Protocol):
    """The measured speeds of the links; see perseus._core.Speeds."""

    @property
    def measurement(self) -> int:
        """The number of the measurement; 0 if there was nothing to measure."""

    @property
    def groups(self) -> int:
        """The number of hosts."""

    @property
    def latency_s(self) -> float:
        """Seconds for a tiny exchange between hosts."""

    @property
    def seconds_per_byte(self) -> float:
        """Seconds in which a rank sends one byte while it receives one."""

    def estimate(self, codec: int, bytes: int) -> float:
        """Return the estimated seconds of an allreduce of float32 values through a codec."""

    def choose(self, bytes: int) -> int:
        """Return the codec that the codec auto would use."""


@dataclass(frozen=True)
class Setting:
    """A setting for gradients and its estimated cost.

    accuracy: how training ends, compared with exact gradients: EXACTLY, EQUIVALENT or WITH_SGD.
    exchange_s: seconds of communication in a step. step_s: seconds of a step whose computation
    hides part of the communication; None if the computation is not known.
    """

    text: str
    accuracy: str
    exchange_s: float
    step_s: float | None


@dataclass(frozen=True)
class Advice:
    """The settings for a model, the most accurate first.

    bytes, tensors: of the model's gradients.
    gbit, latency_s: the speed of the links; None if all ranks share memory, where there is nothing
        to choose.
    compute_s: seconds that a step computes; None = not known.
    best: the index of the setting to use, whatever the optimizer.
    """

    model: str
    bytes: int
    tensors: int
    hosts: int
    gbit: float | None
    latency_s: float | None
    compute_s: float | None
    settings: list[Setting]
    best: int

    def to_json(self) -> str:
        """Return the advice as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Advice:
        """Return the advice that to_json() wrote."""
        values = json.loads(line)
        values["settings"] = [Setting(**setting) for setting in values["settings"]]
        return Advice(**values)


def advise(model: str, shapes: Shapes, speeds: Speeds, compute_s: float | None) -> Advice:
    """Return the advice for gradients of these shapes. compute_s: see Advice."""
    sizes = [4 * math.prod(shape) for _, shape in shapes]

    def setting(text: str, codec_of: Callable[[int], int], accuracy: str = EQUIVALENT) -> Setting:
        # Tensors with the same codec are fused, so they share the latency.
        together: Counter[int] = Counter()
        for size in sizes:
            together[codec_of(size)] += size
        exchange = sum(speeds.estimate(codec, size) for codec, size in together.items())
        return Setting(text, accuracy, exchange, _step(exchange, compute_s))

    known = speeds.measurement > 0
    settings: list[Setting] = []
    if known:
        settings = [
            setting("PERSEUS_ALLREDUCE_DTYPE=1 (exact)", lambda _: EXACT, EXACTLY),
            setting("nothing (float16 between hosts)", lambda _: FLOAT16),
            setting("PERSEUS_ALLREDUCE_CODEC=int8", lambda _: INT8),
            setting("PERSEUS_ALLREDUCE_CODEC=int4", lambda _: INT4, WITH_SGD),
            setting("PERSEUS_ALLREDUCE_CODEC=int2", lambda _: INT2, WITH_SGD),
            setting("PERSEUS_ALLREDUCE_CODEC=auto", speeds.choose),
        ]
    seconds = [s.exchange_s if s.step_s is None else s.step_s for s in settings]
    for_all = [i for i, each in enumerate(settings) if each.accuracy != WITH_SGD]
    enough = min((seconds[i] for i in for_all), default=0.0) / (1 - _ABOUT_AS_FAST)
    return Advice(
        model=model,
        bytes=sum(sizes),
        tensors=len(sizes),
        hosts=speeds.groups,
        gbit=8e-9 / speeds.seconds_per_byte if known else None,
        latency_s=speeds.latency_s if known else None,
        compute_s=compute_s,
        settings=settings,
        best=next((i for i in for_all if seconds[i] <= enough), 0),
    )


def _step(exchange: float, compute: float | None) -> float | None:
    """Return the seconds of a step in which communication overlaps the backward pass."""
    if compute is None:
        return None
    return (1 - _BACKWARD) * compute + max(_BACKWARD * compute, exchange)


def show(advice: Advice) -> str:
    """Format advice as lines for the terminal."""
    of_steps = advice.compute_s is not None
    lines = [f"\n{advice.model}: {show_bytes(advice.bytes)} in {advice.tensors} gradients"]
    if of_steps:
        lines[0] += f", a step computes for {show_seconds(advice.compute_s or 0.0)}"
    if advice.gbit is None or advice.latency_s is None:
        return f"{lines[0]}\n  all ranks share one host's memory: there is nothing to set"
    lines.append(
        f"  {advice.hosts} hosts, {advice.gbit:.3g} Gbit/s, {show_seconds(advice.latency_s)}; "
        f"expected:"
    )
    first = advice.settings[0]
    for i, setting in enumerate(advice.settings):
        ours = setting.exchange_s if setting.step_s is None else setting.step_s
        exact = first.exchange_s if first.step_s is None else first.step_s
        step = "" if setting.step_s is None else f"  step {show_seconds(setting.step_s):>8}"
        lines.append(
            f"  {'->' if i == advice.best else '  '} {setting.text:34} exchange "
            f"{show_seconds(setting.exchange_s):>8}{step}  {exact / ours:.2f} x exact  "
            f"accuracy {setting.accuracy}"
        )
    lines += [
        "  accuracy: how training should end, beside exact gradients; measured: docs/accuracy.md",
        "  with other optimizers than SGD, auto uses neither int4 nor int2, and takes longer",
    ]
    if not of_steps:
        lines.append("  --compute SECONDS tells what of this a step can hide")
    return "\n".join(lines)


def measure(plan: Plan) -> Iterator[Advice]:
    """Yield the advice for each model of the plan, equal on all ranks. A collective.

    It measures the computation of steps only if there is something to choose.
    """
    import torch

    import perseus.torch.horovod as hvd

    hvd.allreduce(torch.zeros(1 << 10), name="bench.advise", compression=hvd.Compression.auto)
    speeds = basics.speeds()
    for name in plan.models or list(MODELS):
        compute = plan.compute_s
        if compute is None and speeds.measurement > 0:
            compute = compute_seconds(name)
        yield advise(name, MODELS[name](), speeds, compute)


def compute_seconds(model: str) -> float | None:
    """Return the seconds of a step on small images, on the slowest rank. A collective.

    Returns None for a model without a module in nets.py.
    """
    import torch
    from torch.nn.functional import cross_entropy

    import perseus.torch.horovod as hvd
    from perseus.bench.nets import NETS

    if model not in NETS:
        return None
    net = NETS[model]
    module = net.make()
    images = torch.randn(BATCH, 3, net.pixels, net.pixels)
    labels = torch.randint(CLASSES, (BATCH,))
    fastest = math.inf
    for i in range(_WARM_UPS + _TIMES):
        hvd.barrier()
        begin = time.perf_counter()
        cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
        if i >= _WARM_UPS:
            fastest = min(fastest, time.perf_counter() - begin)
    seconds = torch.tensor([fastest], dtype=torch.float64)
    return float(hvd.allreduce(seconds, name=f"bench.compute.{model}", op=hvd.Max))
