"""Sends and receives from Python, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patterns import world_with

import perseus.torch.horovod as hvd
from perseus.errors import MismatchError
from perseus.operations import Kind
from perseus.torch.session import session

SIZES = [0, 1, 1000, 300_000]


def _send(tensor: torch.Tensor, to: int, tag: int = 0) -> int:
    return session.submit(Kind.SEND, None, tensor, root=to, tag=tag)


def _receive(tensor: torch.Tensor, source: int = -1, tag: int = 0) -> int:
    return session.submit(Kind.RECEIVE, None, tensor, root=source, tag=tag)


def _wait(handle: int) -> Any:
    return session.synchronize(handle)


def _values(rank: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64) * (rank + 1) + 0.1


def _around_the_ring() -> None:
    """Every rank sends to the next and receives from the last, with allreduces in between."""
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in SIZES:
        received = torch.full((count,), -1.0, dtype=torch.float64)
        handles = [_send(_values(rank, count), after, 7), _receive(received, before, 7)]
        assert hvd.allreduce(torch.ones(10), op=hvd.Sum, name="meanwhile").tolist() == [size] * 10
        assert [_wait(handle) for handle in handles] == [None, before]
        assert torch.equal(received, _values(before, count))


def check_ring() -> None:
    _around_the_ring()


def check_ring_over_tcp() -> None:
    with world_with(PERSEUS_TRANSPORT="tcp"):
        _around_the_ring()


def check_any_source_in_any_order_of_tags() -> None:
    if hvd.rank() != 0:
        sends = [_send(_values(hvd.rank(), 5000 * tag), 0, tag) for tag in range(4)]
        assert [_wait(send) for send in sends] == [None] * 4
        return
    for tag in reversed(range(4)):
        sources = []
        for _ in range(1, hvd.size()):
            received = torch.empty(5000 * tag, dtype=torch.float64)
            sources.append(_wait(_receive(received, tag=tag)))
            assert torch.equal(received, _values(sources[-1], 5000 * tag))
        assert sorted(sources) == list(range(1, hvd.size()))


def check_unequal_sizes_and_what_is_refused() -> None:
    if hvd.rank() < 2:
        wrong = _send(torch.ones(5), 1) if hvd.rank() == 0 else _receive(torch.empty(6), 0)
        text = "rank 0 sends 20 bytes to rank 1 with tag 0, but the receive there is of 24 bytes"
        with pytest.raises(MismatchError, match=text):
            _wait(wrong)
    for peer, tag in ((hvd.rank(), 0), (hvd.size(), 0), ((hvd.rank() + 1) % hvd.size(), -1)):
        with pytest.raises(ValueError, match="with tag"):
            _send(torch.ones(1), peer, tag)
    # Unnamed requests count alike on all ranks, whatever they have sent.
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    _around_the_ring()
