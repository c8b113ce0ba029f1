"""perseus-bench's raw exchange: every byte arrives, over as many connections as there are links."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from perseus.bench.network import RawExchange, own_addresses


def _share(size: int) -> Callable[[int], Callable[[object], list[object]]]:
    """share(rank) of ranks that are threads."""
    values: list[object] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def of(rank: int) -> Callable[[object], list[object]]:
        def share(value: object) -> list[object]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        return share

    return of


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2", "127.0.0.3"]])
def test_neighbours_bytes_arrive_over_all_links(ranks: int, addresses: list[str]) -> None:
    count = 100_003  # no multiple of the links
    share = _share(ranks)
    sent = [torch.arange(count) * 3 + rank for rank in range(ranks)]
    received = [torch.zeros(count, dtype=torch.int64) for _ in range(ranks)]

    def exchange(rank: int) -> None:
        made = RawExchange(rank, ranks, share(rank), addresses)
        made.run(sent[rank], received[rank])
        made.close()

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(ranks):
        assert torch.equal(received[rank], sent[(rank - 1) % ranks])


def test_a_failure_on_any_link_is_raised() -> None:
    share = _share(2)
    exchanges: list[RawExchange] = []

    def make(rank: int) -> None:
        exchanges.append(RawExchange(rank, 2, share(rank), ["127.0.0.1", "127.0.0.2"]))

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join(60)
    exchanges[1].close()
    with pytest.raises(OSError):
        exchanges[0].run(torch.ones(10), torch.zeros(10))
    exchanges[0].close()


def test_links_are_those_the_job_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "PERSEUS_GLOO_NETWORK_INTERFACE"):
        monkeypatch.setenv(name, "lo,lo")
        assert own_addresses() == ["127.0.0.1", "127.0.0.1"]
    monkeypatch.setenv("PERSEUS_GLOO_NETWORK_INTERFACE", "nowhere9")
    with pytest.raises(ValueError, match="nowhere9"):
        own_addresses()
