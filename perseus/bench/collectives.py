"""Measures every collective over a range of sizes, as nccl-tests does. One thread per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from perseus.bench.pattern import total, values
from perseus.bench.peers import Peer
from perseus.bench.plan import IN_EQUAL_PARTS
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject
from perseus.bench.sizes import in_equal_parts

_SWEEP = [4 << 10 << shift for shift in range(0, 15, 2)]  # 4 KiB … 64 MiB


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subjects of all operations, the smallest size first."""
    for operation, make in _OPERATIONS.items():
        for size in session.sizes(_SWEEP):
            parted = operation in IN_EQUAL_PARTS
            exact = in_equal_parts(size, session.size) if parted else size
            contenders = [make(session, peer, exact // 4) for peer in session.peers]
            yield Subject(operation, exact, contenders)


def allreduce(session: Session, peer: Peer, count: int) -> Contender:
    """Return the contender for an in-place sum of `count` float32 values in ordinary memory."""
    expected = total(session.size, count)
    return _in_place(
        session, "allreduce", peer, expected, lambda work: peer.allreduce_(work, f"sum.{count}")
    )


def _broadcast(session: Session, peer: Peer, count: int) -> Contender:
    return _in_place(session, "broadcast", peer, values(0, count), peer.broadcast_)


def _in_place(
    session: Session,
    operation: str,
    peer: Peer,
    expected: torch.Tensor,
    call: Callable[[torch.Tensor], None],
) -> Contender:
    source = values(session.rank, expected.numel()).to(session.device)
    expected = expected.to(session.device)
    work = torch.empty_like(source)
    return Contender(
        peer.name,
        operation,
        session.to_its_end(lambda _: call(work)),
        session.to_its_end(lambda: work.copy_(source)),
        lambda: torch.equal(work, expected),
        payload=session.payload(operation, 4 * expected.numel())
        if operation == "allreduce"
        else None,
    )


def _allgather(session: Session, peer: Peer, count: int) -> Contender:
    part = count // session.size
    expected = torch.cat([values(rank, part) for rank in range(session.size)])
    source = values(session.rank, part)
    return _into_output(peer.name, "allgather", peer.allgather, source, expected)


def _reducescatter(session: Session, peer: Peer, count: int) -> Contender:
    expected = total(session.size, count).chunk(session.size)[session.rank].clone()
    source = values(session.rank, count)
    return _into_output(peer.name, "reducescatter", peer.reducescatter, source, expected)


def _alltoall(session: Session, peer: Peer, count: int) -> Contender:
    parts = [values(r, count).chunk(session.size)[session.rank] for r in range(session.size)]
    source = values(session.rank, count)
    return _into_output(peer.name, "alltoall", peer.alltoall, source, torch.cat(parts))


def _into_output(
    name: str,
    operation: str,
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    source: torch.Tensor,
    expected: torch.Tensor,
) -> Contender:
    output = torch.empty_like(expected)
    result = output

    def prepare() -> None:
        nonlocal result
        result = output.zero_()

    def run(_: int) -> None:
        nonlocal result
        result = call(source, output)

    return Contender(name, operation, run, prepare, lambda: torch.equal(result, expected))


_OPERATIONS: dict[str, Callable[[Session, Peer, int], Contender]] = {
    "allreduce": allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "reducescatter": _reducescatter,
    "alltoall": _alltoall,
}
