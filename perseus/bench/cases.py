"""What is measured: each case times Perseus, its peers and what limits them. One thread per rank.

A case yields subjects; all contenders of a subject are timed in turn. Every repetition's result is
compared with the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from perseus.bench import collectives, memory, models
from perseus.bench.network import RawExchange
from perseus.bench.pattern import total, values
from perseus.bench.peers import Peer
from perseus.bench.record import bus_factor
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject

_SMALL_TENSORS, _SMALL_ELEMENTS = 500, 1000
_LATENCY_CALLS, _LATENCY_WARM_UPS = 20, 5
# A library at work is not interrupted by another after every step: the first call of a turn, which
# finds the other's threads and cache lines, does not count.
_STEPS, _STEP_WARM_UPS = 3, 1
_LARGE = [64 << 20]


def one_large(session: Session) -> Iterator[Subject]:
    """In-place allreduce of one tensor, against all ranks copying as much at the same time."""
    for size in session.sizes(_LARGE):
        contenders = [collectives.allreduce(session, peer, size // 4) for peer in session.peers]
        for copy in memory.copies(size):
            contenders.append(Contender(copy.name, "copy", copy.run, copy.prepare, copy.correct))
        yield Subject("memory", size, contenders)


def network(session: Session) -> Iterator[Subject]:
    """In-place allreduce of one tensor, against a raw exchange of the bytes that it must move."""
    if session.size < 2:
        return
    exchange = RawExchange(session.rank, session.size, session.share)
    for size in session.sizes(_LARGE):
        contenders = [collectives.allreduce(session, peer, size // 4) for peer in session.peers]
        moved = int(bus_factor("allreduce", session.size) * size) // 4
        outgoing = values(session.rank, moved)
        expected = values((session.rank - 1) % session.size, moved)
        incoming = torch.empty_like(expected)
        contenders.append(
            Contender(
                "raw-tcp",
                "exchange",
                partial(exchange.run, outgoing, incoming),
                incoming.zero_,
                partial(torch.equal, incoming, expected),
                payload=session.payload("allreduce", size),
            )
        )
        yield Subject("network", size, contenders)
    exchange.close()


def latency(session: Session) -> Iterator[Subject]:
    """The blocking allreduce of a tensor so small that only the way counts."""
    for size in session.sizes([4]):
        yield Subject("latency", size, [_small(session, peer, size) for peer in session.peers])


def _small(session: Session, peer: Peer, size: int) -> Contender:
    count = _LATENCY_CALLS + _LATENCY_WARM_UPS
    sources = [values(session.rank, size // 4) + i for i in range(count)]
    expected = [total(session.size, size // 4) + session.size * i for i in range(count)]
    work = [torch.empty_like(source) for source in sources]
    results = list(work)
    name = f"latency.{size}"

    def run(i: int) -> None:
        results[i] = peer.allreduce(work[i], name)

    return Contender(
        peer.name,
        "allreduce",
        run,
        partial(_copy_all, work, sources),
        lambda: all(map(torch.equal, results, expected)),
        calls=_LATENCY_CALLS,
        warm=_LATENCY_WARM_UPS,
    )


def small_tensors(session: Session) -> Iterator[Subject]:
    """500 tensors of 1000 floats, all started, then all waited for, against packing them alone."""
    subject = _many_tensors(
        session,
        "tensors",
        [_SMALL_ELEMENTS] * _SMALL_TENSORS,
        steps=_STEPS,
        warm_ups=_STEP_WARM_UPS,
    )
    sources = [values(session.rank + i, _SMALL_ELEMENTS) for i in range(_SMALL_TENSORS)]
    work = [torch.empty_like(source) for source in sources]

    def pack(_: int) -> None:
        flat = torch.cat(work)
        for tensor, piece in zip(work, torch.split(flat, _SMALL_ELEMENTS), strict=True):
            tensor.copy_(piece)

    fill = partial(_copy_all, work, sources)
    packing = Contender(
        "cat-and-copy",
        "copy",
        pack,
        fill,
        lambda: all(map(torch.equal, work, sources)),
        calls=_STEPS,
        warm=_STEP_WARM_UPS,
    )
    subject.contenders.append(packing)
    yield subject


def gradients(session: Session) -> Iterator[Subject]:
    """A model's gradients, last layer first, all started, then all waited for."""
    for model in session.plan.models or models.MODELS:
        subject = _many_tensors(session, "gradients", models.MODELS[model]()[::-1], model)
        subject.settings["model"] = model
        yield subject


def _many_tensors(
    session: Session,
    case: str,
    counts: list[int],
    label: str = "",
    *,
    steps: int = 1,
    warm_ups: int = 0,
) -> Subject:
    """Tensor i of rank r holds values(r + i)."""
    sources = [values(session.rank + i, count) for i, count in enumerate(counts)]
    # The first sum is equal on all ranks, so every further one multiplies by their number.
    repeated = session.size ** (steps + warm_ups - 1)
    expected = [total(session.size, count, first=i) * repeated for i, count in enumerate(counts)]
    work = [torch.empty_like(source) for source in sources]
    names = [f"{case}.{label}.{i}" for i in range(len(counts))]

    def contender(peer: Peer) -> Contender:
        return Contender(
            peer.name,
            "allreduce",
            lambda _: peer.allreduce_many_(work, names),
            partial(_copy_all, work, sources),
            lambda: all(map(torch.equal, work, expected)),
            calls=steps,
            warm=warm_ups,
            payload=session.payload("allreduce", 4 * sum(counts)),
        )

    contenders = [contender(peer) for peer in session.peers]
    return Subject(case, 4 * sum(counts), contenders, tensors=len(counts))


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


CASES: dict[str, Callable[[Session], Iterator[Subject]]] = {
    "memory": one_large,
    "latency": latency,
    "tensors": small_tensors,
    "network": network,
    "gradients": gradients,
    "collectives": collectives.sweep,
}
