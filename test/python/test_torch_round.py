"""Ranks that meet through torch's store believe what this round's rank 0 says, and nothing older.

The store is a dict here; test_rendezvous_torch.py has torch's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from perseus.run.bootstrap.torch_round import announce, ask, await_announcement


class Store:
    """torch's, as far as it is used."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self.sets = 0

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self.sets += 1
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait_for_sets(self, number: int) -> None:
        """Until there were so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.sets >= number, 60)


def soon() -> float:
    return time.monotonic() + 60


class Rank(threading.Thread):
    """Calls a function and keeps how it ends."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self._ask = ask
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._ask()
        except (ValueError, TimeoutError) as error:
            self.result = error

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        return self.result


def follow(store: Store, rank: int, read: Callable[[str], Any] = str.upper) -> Rank:
    return Rank(lambda: await_announcement(store, rank, read, soon(), "speak in time"))


def test_a_round_that_nothing_precedes() -> None:
    store = Store()
    others = [follow(store, rank) for rank in (1, 2)]
    announce(store, "here", 3, soon(), "it")
    assert [other.end() for other in others] == ["HERE", "HERE"]


@pytest.mark.parametrize("size", [2, 3])  # of the round before, of which all ranks had come
def test_what_an_earlier_round_left_is_passed_over(size: int) -> None:
    store = Store()
    others = [follow(store, rank) for rank in range(1, size)]
    announce(store, "old", size, soon(), "it")
    for other in others:
        assert other.end() == "OLD"
    before = store.sets
    others = [follow(store, rank) for rank in (1, 2)]
    store.wait_for_sets(before + 2)  # they have answered what is left
    announce(store, "new", 3, soon(), "it")
    assert [other.end() for other in others] == ["NEW", "NEW"]


def test_a_round_whose_rank_0_did_not_finish_is_passed_over() -> None:
    store = Store()
    with pytest.raises(TimeoutError):
        announce(store, "old", 3, time.monotonic() - 1, "it")
    others = [follow(store, rank) for rank in (1, 2)]
    store.wait_for_sets(3)
    announce(store, "new", 3, soon(), "it")
    assert [other.end() for other in others] == ["NEW", "NEW"]


def test_what_one_rank_refuses_is_an_error_on_all() -> None:
    def refuse(text: str) -> str:
        raise ValueError(f"rank 2 does not like {text}")

    store = Store()
    others = [follow(store, 1), follow(store, 2, refuse)]
    with pytest.raises(ValueError, match=r"^rank 2 does not like here$"):
        announce(store, "here", 3, soon(), "it")
    assert [str(other.end()) for other in others] == ["rank 2 does not like here"] * 2


def test_what_is_refused_in_an_earlier_round_is_no_error() -> None:
    def refuse_old(text: str) -> str:
        if text == "old":
            raise ValueError("old")
        return text

    store = Store()
    with pytest.raises(TimeoutError):
        announce(store, "old", 2, time.monotonic() - 1, "it")
    other = follow(store, 1, refuse_old)
    store.wait_for_sets(2)
    announce(store, "new", 2, soon(), "it")
    assert other.end() == "new"


def test_missing_ranks_are_named() -> None:
    store = Store()
    # Rank 2 answers, and rank 0 has time to see it.
    first = Rank(lambda: announce(store, "here", 4, time.monotonic() + 1, "the store in time"))
    assert follow_until(store, 2) == "[rendezvous] rank 0 did not speak in time"
    assert str(first.end()) == "[rendezvous] ranks 1, 3 did not come to the store in time"


def test_rank_0_hears_what_ranks_of_this_round_tell() -> None:
    def follow_and_tell(rank: int, host: str) -> Rank:
        return Rank(lambda: await_announcement(store, rank, str, soon(), "speak", tells=host))

    store = Store()
    for hosts in (["a", "b"], ["b", "c"]):
        first = Rank(lambda: ask(store, 3, soon(), "it"))
        time.sleep(0.1)  # in the second round it finds what the first one has left
        others = [follow_and_tell(rank, host) for rank, host in enumerate(hosts, 1)]
        assert first.end() == hosts
        announce(store, "here", 3, soon(), "it")
        assert [other.end() for other in others] == ["here", "here"]


def follow_until(store: Store, rank: int) -> str:
    with pytest.raises(TimeoutError) as caught:
        await_announcement(store, rank, str, time.monotonic() + 1, "speak in time")
    return str(caught.value)
