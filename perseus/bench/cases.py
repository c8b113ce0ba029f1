"""The cases of perseus-bench, which time Perseus, its peers and the machine's limits.

A case yields subjects, and all contenders of a subject are timed in turn. Every repetition's result
is compared with the exact one, within the error bound of the codec. One thread per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from perseus.bench import collectives, ddp, ddp_training, gradients, memory, training
from perseus.bench.groups import on_perseus
from perseus.bench.network import RawExchange, own_addresses
from perseus.bench.pattern import total, values
from perseus.bench.peers import GlooPeer, GroupPeer, Peer
from perseus.bench.plan import GROUP
from perseus.bench.record import bus_factor
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject

_SMALL_TENSORS, _SMALL_ELEMENTS = 500, 1000
_LATENCY_CALLS, _LATENCY_WARM_UPS = 20, 5
# In a program, no other library runs between two steps. The first call of a turn does not count,
# because it finds the threads and the cache lines of the contender before.
_STEPS, _STEP_WARM_UPS = 3, 1
_LARGE = [64 << 20]


def one_large(session: Session) -> Iterator[Subject]:
    """Measure the in-place allreduce of one tensor, against simultaneous copies on all ranks."""
    for size in session.sizes(_LARGE):
        contenders = [collectives.allreduce(session, peer, size // 4) for peer in session.peers]
        for copy in memory.copies(size):
            contenders.append(Contender(copy.name, "copy", copy.run, copy.prepare, copy.correct))
        yield Subject("memory", size, contenders)


def network(session: Session) -> Iterator[Subject]:
    """Measure the in-place allreduce of one tensor, against a raw exchange of its bytes."""
    found = own_addresses()
    # NCCL_SOCKET_IFNAME=eth may mean more interfaces on one host than on another.
    addresses = found[: min(map(len, session.share(found)))]
    exchanges = {"raw-tcp": RawExchange(session.rank, session.size, session.share, addresses)}
    if len(addresses) > 1:
        one = RawExchange(session.rank, session.size, session.share, addresses[:1])
        exchanges["raw-tcp-one-link"] = one
    for size in session.sizes(_LARGE):
        contenders = [collectives.allreduce(session, peer, size // 4) for peer in session.peers]
        moved = int(bus_factor("allreduce", session.size) * size) // 4
        outgoing = values(session.rank, moved)
        expected = values((session.rank - 1) % session.size, moved)
        incoming = torch.empty_like(expected)
        contenders += [
            Contender(
                name,
                "exchange",
                partial(exchange.run, outgoing, incoming),
                incoming.zero_,
                partial(torch.equal, incoming, expected),
                payload=session.payload("allreduce", size),
            )
            for name, exchange in exchanges.items()
        ]
        yield Subject("network", size, contenders)
    for exchange in exchanges.values():
        exchange.close()


def latency(session: Session) -> Iterator[Subject]:
    """Measure the blocking allreduce of a tensor so small that only the latency counts."""
    for size in session.sizes([4]):
        contenders = [_small(session, peer, size) for peer in session.peers]
        if any(peer.name == GlooPeer.name for peer in session.peers):
            contenders.append(_small(session, GroupPeer(GROUP, on_perseus()), size))
        yield Subject("latency", size, contenders)


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
    """Measure allreduces of 500 tensors of 1000 floats, all in flight, against packing alone."""
    count, size = _SMALL_TENSORS, _SMALL_ELEMENTS
    sources = [values(session.rank + i, size) for i in range(count)]
    # The first sum is equal on all ranks, so every further sum multiplies it by their number.
    repeated = session.size ** (_STEPS + _STEP_WARM_UPS - 1)
    sums = [total(session.size, size, first=i) * repeated for i in range(count)]
    # Further sums may exceed 2**24, above which float32 rounds whole numbers.
    rounding = session.size * (_STEPS + _STEP_WARM_UPS) * 2.0**-24
    work = [torch.empty_like(source) for source in sources]
    names = [f"tensors.{i}" for i in range(count)]

    def pack(_: int) -> None:
        flat = torch.cat(work)
        for tensor, piece in zip(work, torch.split(flat, size), strict=True):
            tensor.copy_(piece)

    def contender(
        name: str,
        operation: str,
        run: Callable[[int], None],
        expected: list[torch.Tensor],
        payload: int | None,
    ) -> Contender:
        def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
            return bool(((found - exact).abs() <= rounding * exact).all())

        return Contender(
            name,
            operation,
            run,
            partial(_copy_all, work, sources),
            lambda: all(map(near, work, expected)),
            calls=_STEPS,
            warm=_STEP_WARM_UPS,
            payload=payload,
        )

    payload = session.payload("allreduce", 4 * count * size)
    contenders = [
        contender(
            peer.name,
            "allreduce",
            lambda _, peer=peer: peer.allreduce_many_(work, names),  # type: ignore[misc]
            sums,
            payload,
        )
        for peer in session.peers
    ]
    contenders.append(contender("cat-and-copy", "copy", pack, sources, None))
    yield Subject("tensors", 4 * count * size, contenders, tensors=count)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


CASES: dict[str, Callable[[Session], Iterator[Subject]]] = {
    "memory": one_large,
    "latency": latency,
    "tensors": small_tensors,
    "network": network,
    "gradients": gradients.sweep,
    "training": training.sweep,
    "ddp": ddp.sweep,
    "ddp-training": ddp_training.sweep,
    "collectives": collectives.sweep,
}
