"""What settings to use: the core's cost model, with measured speeds, for a whole model's step.

Pure but for measure() and compute_seconds(), which ranks call together.
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
from perseus.compression import EXACT, FLOAT16, INT8, TOP_K

_BACKWARD = 2 / 3  # of a step's computation: two products for each one of the forward pass
_ABOUT_AS_FAST = 0.05  # as for the codec auto: then the more accurate setting is taken
_WARM_UPS, _TIMES = 1, 3


class Speeds(Protocol):
    """perseus._core.Speeds."""

    @property
    def measurement(self) -> int:
        """Its number, 0 where there was nothing to measure."""

    @property
    def groups(self) -> int:
        """Hosts."""

    @property
    def latency_s(self) -> float:
        """Of a tiny exchange between them."""

    @property
    def seconds_per_byte(self) -> float:
        """That a rank sends while it receives one."""

    def estimate(self, codec: int, bytes: int) -> float:
        """Seconds of an allreduce of float32."""

    def choose(self, bytes: int) -> int:
        """The codec that auto takes."""


@dataclass(frozen=True)
class Setting:
    """A way of sending gradients. exchange_s: a step's communication; step_s: with computation that
    hides what it can, None where that is not known."""

    text: str
    exchange_s: float
    step_s: float | None


@dataclass(frozen=True)
class Advice:
    """A model's settings, the most accurate first. best: index of the one to use.

    compute_s: a step's computation. gbit, latency_s: of the links; None where all ranks share
    memory and there is nothing to choose.
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
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Advice:
        """What to_json wrote."""
        values = json.loads(line)
        values["settings"] = [Setting(**setting) for setting in values["settings"]]
        return Advice(**values)


def advise(
    model: str, shapes: Shapes, speeds: Speeds, sparse_from: int, compute_s: float | None
) -> Advice:
    """The advice for gradients of these shapes. sparse_from: LIGHT_TOPK_THRESHOLD, in bytes."""
    sizes = [4 * math.prod(shape) for _, shape in shapes]

    def setting(text: str, codec_of: Callable[[int], int]) -> Setting:
        # Tensors of one codec are fused: they share the latency.
        together: Counter[int] = Counter()
        for size in sizes:
            together[codec_of(size)] += size
        exchange = sum(speeds.estimate(codec, size) for codec, size in together.items())
        return Setting(text, exchange, _step(exchange, compute_s))

    known = speeds.measurement > 0
    settings: list[Setting] = []
    if known:
        settings = [
            setting("PERSEUS_ALLREDUCE_DTYPE=1 (exact)", lambda _: EXACT),
            setting("nothing (float16 between hosts)", lambda _: FLOAT16),
            setting("PERSEUS_ALLREDUCE_CODEC=int8", lambda _: INT8),
            setting("PERSEUS_ALLREDUCE_CODEC=auto", speeds.choose),
            setting(
                "LIGHT_TOPK_ALLREDUCE=1", lambda size: TOP_K if size >= sparse_from else FLOAT16
            ),
        ]
    seconds = [s.exchange_s if s.step_s is None else s.step_s for s in settings]
    enough = min(seconds, default=0.0) / (1 - _ABOUT_AS_FAST)
    return Advice(
        model=model,
        bytes=sum(sizes),
        tensors=len(sizes),
        hosts=speeds.groups,
        gbit=8e-9 / speeds.seconds_per_byte if known else None,
        latency_s=speeds.latency_s if known else None,
        compute_s=compute_s,
        settings=settings,
        best=next((i for i, value in enumerate(seconds) if value <= enough), 0),
    )


def _step(exchange: float, compute: float | None) -> float | None:
    """Gradients travel while the rest of the backward pass is computed."""
    if compute is None:
        return None
    return (1 - _BACKWARD) * compute + max(_BACKWARD * compute, exchange)


def show(advice: Advice) -> str:
    """Some lines for a person."""
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
            f"{show_seconds(setting.exchange_s):>8}{step}  {exact / ours:.2f} x exact"
        )
    if not of_steps:
        lines.append("  --compute SECONDS tells what of this a step can hide")
    return "\n".join(lines)


def measure(plan: Plan) -> Iterator[Advice]:
    """Advice for each model of the plan, the same on all ranks. A collective.

    Where there is nothing to choose, no step is computed for it.
    """
    import torch

    import perseus.torch.horovod as hvd

    hvd.allreduce(torch.zeros(1 << 10), name="bench.advise", compression=hvd.Compression.auto)
    speeds = basics.speeds()
    sparse_from = basics.setting("LIGHT_TOPK_THRESHOLD")
    for name in plan.models or list(MODELS):
        compute = plan.compute_s
        if compute is None and speeds.measurement > 0:
            compute = compute_seconds(name)
        yield advise(name, MODELS[name](), speeds, sparse_from, compute)


def compute_seconds(model: str) -> float | None:
    """A step of the network on small images, on the slowest rank. A collective.

    None where we have no module of it.
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
