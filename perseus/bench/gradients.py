"""Measures the reduction of a model's gradients, without and with codecs, against peers.

Values are standard normal and differ per rank and step. Every result is checked against the error
bound of its codec. One thread per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_SPREAD = 1 << 20  # the number of different windows of normal values
_STRIDE = 4099  # elements between windows; it is odd, so that all windows are used
_SMALL = 4096  # elements of a tensor that a sparse codec may send as a whole


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subjects: each model's gradients, the last layer first, or one tensor per size."""
    plan = session.plan
    names = plan.models or ([] if plan.sizes else list(MODELS))
    for name in names:
        yield _subject(session, name, MODELS[name]()[::-1], {"model": name})
    for size in plan.sizes:
        yield _subject(session, f"one.{size}", [("weight", (size // 4,))], {})


class NormalData:
    """The gradients of all ranks: windows of one array of normal values.

    Every rank has the array, so it can compute the average without communication.
    """

    def __init__(self, count: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._values = torch.randn(count + _SPREAD, generator=generator)
        self._ranks = ranks
        self.largest = float(self._values.abs().max())

    def piece(self, rank: int, step: int, start: int, count: int) -> torch.Tensor:
        """Return a view of float32 of shape (count,): gradients of a rank in a step, from `start`
        on."""
        begin = start + (step * self._ranks + rank) * _STRIDE % _SPREAD
        return self._values[begin : begin + count]

    def average(self, step: int, start: int, count: int) -> torch.Tensor:
        """Return the average over all ranks as a new tensor."""
        result = self.piece(0, step, start, count).clone()
        for rank in range(1, self._ranks):
            result += self.piece(rank, step, start, count)
        return result.div_(self._ranks)

    def is_average(
        self,
        step: int,
        found: Iterable[tuple[int, torch.Tensor]],
        codec: Codec,
        scale: int = 1,
    ) -> bool:
        """Return whether tensors are the average times `scale`, within the codec's bounds.

        found: pairs of `start` and values of shape (count,). codec: must not hold back values.
        """
        largest, rms = codec.bounds(self._ranks)
        squares, count = 0.0, 0
        for start, flat in found:
            wanted = self.average(step, start, flat.numel()).mul_(scale)
            error = wanted.sub_(flat.cpu()).abs_()
            # `not <=` rather than `>`, so that NaN fails.
            if not float(error.max()) <= largest * self.largest * scale:
                return False
            squares += float(error.square_().sum())
            count += flat.numel()
        return math.sqrt(squares / count) <= rms * scale


class Entrant:
    """Fills one contender's gradients before each step, and verifies the results after it.

    gradients: float32 tensors, which are reduced in place.
    scale: the factor of the results relative to the average; the number of ranks for sums.

    If the codec holds values back, it keeps the sum of all results.
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
        """Fill in the gradients of the next step."""
        self._step += 1
        rank = self._session.rank
        for start, flat in self._flat():
            flat.copy_(self._data.piece(rank, self._step, start, flat.numel()))

    def check(self) -> bool:
        """Return whether the results are within the codec's bound; Perseus' results must also be
        equal on all ranks. A collective."""
        self._take()
        right = self._scale != 1 or self._session.same(g.cpu().numpy() for g in self._gradients)
        if not self._codec.holds_back:
            found = self._flat()
            return self._data.is_average(self._step, found, self._codec, self._scale) and right
        if self._codec.name == "topk":
            return self._is_sparse() and right
        return right

    def conclude(self, reduce: Callable[[int], None]) -> bool:
        """Return whether no value was lost but by rounding, after the residuals were flushed.

        A collective. If residuals cannot be flushed, returns whether the missing values have a
        smaller norm than the exact sum.
        """
        if not self._given:
            return True
        flush: Callable[[], None] | None = getattr(hvd, "flush_residuals", None)
        if flush is not None:
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
        if flush is None:
            return held < produced
        steps = self._step + 1
        bound = steps * self._codec.lost + steps * steps * self._session.size * 2.0**-23
        return largest <= bound * self._data.largest

    def _take(self) -> None:
        for given, (_, flat) in zip(self._given, self._flat(), strict=False):
            given.add_(flat.cpu())

    def _flat(self) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        for gradient in self._gradients:
            yield start, gradient.view(-1)
            start += gradient.numel()

    def _is_sparse(self) -> bool:
        """Return whether the number of non-zero elements is within what all ranks may send."""
        filled = sum(int(flat.count_nonzero()) for _, flat in self._flat())
        count = sum(flat.numel() for _, flat in self._flat())
        small = sum(flat.numel() for _, flat in self._flat() if flat.numel() <= _SMALL)
        assert self._codec.argument is not None
        return 0 < filled <= 1.25 * self._codec.argument * self._session.size * count + small


def _subject(session: Session, label: str, shapes: Shapes, settings: dict[str, str]) -> Subject:
    count = sum(math.prod(shape) for _, shape in shapes)
    data = NormalData(count, session.size)
    # All contenders take turns on the same gradients. Parameters are never read or written.
    parameters = [
        torch.nn.Parameter(torch.empty(shape, device=session.device)) for _, shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
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
        entrant = Entrant(session, data, gradients, session.acting(codec), scale)
        return Contender(
            name,
            "allreduce",
            session.to_its_end(run),
            session.to_its_end(entrant.fill),
            entrant.check,
            codec=codec.label,
            conclude=lambda: entrant.conclude(run),
            **session.payloads(codec, 4 * count),
        )

    contenders = [ours(plain), *(theirs(peer) for peer in session.peers[1:])]
    contenders += [ours(codec) for codec in wanted if codec != plain]
    return Subject("gradients", 4 * count, contenders, len(shapes), settings)
