"""Gradients as an optimizer submits them, plain and through codecs, against peers. One thread per
rank.

Values are standard normal and differ per rank and step; every result is held to its codec's bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

import perseus.torch.horovod as hvd
from perseus.bench import codecs
from perseus.bench.codecs import Codec
from perseus.bench.models import MODELS, Shapes
from perseus.bench.peers import Peer
from perseus.bench.plan import PERSEUS
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject

_SEED = 20
_SPREAD = 1 << 20  # windows of normal values that differ
_STRIDE = 4099  # elements between two windows: odd, so all of them come
_SMALL = 4096  # elements of a tensor that a sparse codec may well send whole


def sweep(session: Session) -> Iterator[Subject]:
    """Each model's gradients, last layer first, or one tensor of each size."""
    plan = session.plan
    names = plan.models or ([] if plan.sizes else list(MODELS))
    for name in names:
        yield _subject(session, name, MODELS[name]()[::-1], {"model": name})
    for size in plan.sizes:
        yield _subject(session, f"one.{size}", [("weight", (size // 4,))], {})


class NormalData:
    """What ranks put in: windows of one array of normal values that all ranks have.

    So every rank knows the average, without communication.
    """

    def __init__(self, count: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._values = torch.randn(count + _SPREAD, generator=generator)
        self._ranks = ranks
        self.largest = float(self._values.abs().max())

    def piece(self, rank: int, step: int, start: int, count: int) -> torch.Tensor:
        """float32 (count,): a rank's gradients of a step, from element `start` on. A view."""
        begin = start + (step * self._ranks + rank) * _STRIDE % _SPREAD
        return self._values[begin : begin + count]

    def average(self, step: int, start: int, count: int) -> torch.Tensor:
        """The average over ranks, a new tensor."""
        result = self.piece(0, step, start, count).clone()
        for rank in range(1, self._ranks):
            result += self.piece(rank, step, start, count)
        return result.div_(self._ranks)


class Entrant:
    """One contender's gradients: filled before a step, verified after it.

    gradients: of float32, reduced in place. scale: of results, relative to the average. Keeps the
    sum of all results where a codec holds part of them back.
    """

    def __init__(
        self,
        session: Session,
        data: NormalData,
        gradients: Sequence[torch.Tensor],
        codec: Codec,
        scale: int,
    ) -> None:
        self._session = session
        self._data = data
        self._gradients = gradients
        self._codec = codec
        self._scale = scale
        self._step = -1
        self._given: list[torch.Tensor] = []
        if codec.holds_back:
            self._given = [torch.zeros(gradient.numel()) for gradient in gradients]

    def fill(self) -> None:
        """The next step's gradients."""
        self._step += 1
        rank = self._session.rank
        for start, flat in self._flat():
            flat.copy_(self._data.piece(rank, self._step, start, flat.numel()))

    def check(self) -> bool:
        """Whether the step's results are within the codec's bound, and ours the same everywhere."""
        self._take()
        right = self._scale != 1 or self._session.same(g.numpy() for g in self._gradients)
        if not self._codec.holds_back:
            return self._within_bounds() and right
        if self._codec.name == "rotate":
            return self._rotates() and right
        if self._codec.name == "topk":
            return self._is_sparse() and right
        return right

    def conclude(self, reduce: Callable[[int], None]) -> bool:
        """Whether nothing is lost: a flush returns the held-back values. A collective.

        Without hvd.flush_residuals, whether what came out points where what went in does.
        """
        if not self._given:
            return True
        flush: Callable[[], None] | None = getattr(hvd, "flush_residuals", None)
        if flush is not None and _momentum() == 1.0:
            flush()
            self.fill()
            reduce(0)
            self._take()
        held = produced = largest = 0.0
        for (start, flat), given in zip(self._flat(), self._given, strict=True):
            wanted = torch.zeros(flat.numel())
            for step in range(self._step + 1):
                wanted += self._data.average(step, start, flat.numel())
            produced += float(wanted.square().sum())
            missing = wanted.sub_(given)
            held += float(missing.square().sum())
            largest = max(largest, float(missing.abs().max()))
        if flush is None or _momentum() != 1.0:
            return held < produced
        steps = self._step + 1
        return largest <= steps * steps * self._session.size * 2.0**-23 * self._data.largest

    def _take(self) -> None:
        for given, (_, flat) in zip(self._given, self._flat(), strict=False):
            given.add_(flat)

    def _flat(self) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        for gradient in self._gradients:
            yield start, gradient.view(-1)
            start += gradient.numel()

    def _within_bounds(self) -> bool:
        largest, rms = self._codec.bounds(self._session.size)
        squares, count = 0.0, 0
        for start, flat in self._flat():
            wanted = self._data.average(self._step, start, flat.numel()).mul_(self._scale)
            error = wanted.sub_(flat).abs_()
            # Written so that NaN fails.
            if not float(error.max()) <= largest * self._data.largest * self._scale:
                return False
            squares += float(error.square_().sum())
            count += flat.numel()
        return math.sqrt(squares / count) <= rms * self._scale

    def _is_sparse(self) -> bool:
        """At most what all ranks together may send, and something."""
        filled = sum(int(flat.count_nonzero()) for _, flat in self._flat())
        count = sum(flat.numel() for _, flat in self._flat())
        small = sum(flat.numel() for _, flat in self._flat() if flat.numel() <= _SMALL)
        assert self._codec.argument is not None
        return 0 < filled <= 1.25 * self._codec.argument * self._session.size * count + small

    def _rotates(self) -> bool:
        """One in N elements carries the sum of its last N gradients; the others are zero."""
        assert self._codec.argument is not None
        turns = int(self._codec.argument)
        largest = turns * turns * self._session.size * 2.0**-22 * self._data.largest
        filled = count = 0
        for start, flat in self._flat():
            carried = torch.zeros(flat.numel())
            for step in range(max(0, self._step - turns + 1), self._step + 1):
                carried.mul_(_momentum())
                carried += self._data.average(step, start, flat.numel())
            sent = flat != 0
            if not bool((carried.sub_(flat)[sent].abs() <= largest).all()):
                return False
            filled += int(sent.sum())
            count += flat.numel()
        small = sum(1 for _, flat in self._flat()) * _SMALL
        return 0 < filled <= count / turns + small


def _momentum() -> float:
    return float(os.environ.get("PERSEUS_GRADIENT_MOMENTUM") or 1.0)


def _subject(session: Session, label: str, shapes: Shapes, settings: dict[str, str]) -> Subject:
    count = sum(math.prod(shape) for _, shape in shapes)
    data = NormalData(count, session.size)
    # All contenders take turns on the same memory. Parameters are never read or written.
    parameters = [torch.nn.Parameter(torch.empty(shape)) for _, shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros(parameter.shape)
    gradients = [cast(torch.Tensor, parameter.grad) for parameter in parameters]
    plain = Codec(codecs.PLAIN)
    wanted = codecs.parse(",".join(session.plan.codecs))

    def ours(codec: Codec) -> Contender:
        named = [
            (f"{label}.{codec.label}.{name}", parameter)
            for (name, _), parameter in zip(shapes, parameters, strict=True)
        ]
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1), named_parameters=named, **codec.arguments()
        )
        return contender(PERSEUS, codec, lambda _: optimizer.synchronize(), 1)

    def theirs(peer: Peer) -> Contender:
        names = [f"{label}.{name}" for name, _ in shapes]
        return contender(
            peer.name, plain, lambda _: peer.allreduce_many_(gradients, names), session.size
        )

    def contender(name: str, codec: Codec, run: Callable[[int], None], scale: int) -> Contender:
        # Inside a host everything is exact.
        bound = codec if session.hosts > 1 else plain
        entrant = Entrant(session, data, gradients, bound, scale)
        return Contender(
            name,
            "allreduce",
            run,
            entrant.fill,
            entrant.check,
            codec=codec.label,
            conclude=lambda: entrant.conclude(run),
            **session.payloads(codec, 4 * count),
        )

    contenders = [ours(plain), *(theirs(peer) for peer in session.peers[1:])]
    contenders += [ours(codec) for codec in wanted if codec != plain]
    return Subject("gradients", 4 * count, contenders, len(shapes), settings)
