"""A survivor of an elastic job that feeds new ranks: what it sends, how, and who is told when."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from perseus import _core, errors
from perseus.elastic import HostUpdateResult, ObjectState, notification_manager
from perseus.elastic import state as states
from perseus.feeding import BLOCK, Feeding, resting
from perseus.run.bootstrap import words
from perseus.run.elastic.feeds import Feeds
from perseus.run.elastic.process import Process

# ---- what is sent ----


def array(blocks: int, rest: int = 0) -> bytearray:
    return bytearray(secrets.token_bytes(blocks * BLOCK + rest))


class Training:
    """Steps that change a byte in each of these places (array, index), one after the other."""

    def __init__(self, arrays: list[bytearray], places: list[tuple[int, int]]) -> None:
        self._arrays, self._places = arrays, places

    def step(self, stopped: threading.Event | None = None) -> None:
        for number, index in self._places:
            self._arrays[number][index] ^= 0xFF


@contextmanager
def running(training: Training, part: Feeding) -> Iterator[None]:
    """Steps are done, of which a survivor's part in a feed is told, until the end."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            training.step()
            part.on_step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_only_what_does_not_change_is_sent() -> None:
    arrays = [array(3, 100), array(0), array(0, 7), array(2)]
    before = [bytes(each) for each in arrays]
    training = Training(arrays, [(0, BLOCK + 5), (0, 3 * BLOCK + 99), (3, 0)])
    views = partial(map, memoryview, arrays)
    found = list(resting(views, threading.Event(), training.step))
    first = before[0]
    assert found == [first[:BLOCK], first[2 * BLOCK : 3 * BLOCK], before[2], before[3][BLOCK:]]


def test_a_look_in_the_middle_of_a_step_deceives_nobody() -> None:
    arrays = [array(4)]
    pieces = iter([0, 1, 2, 3, 0, 1, 2, 3])

    def half_a_step(stopped: threading.Event) -> None:
        for _ in range(2 if next(calls) == 0 else 4):
            arrays[0][next(pieces) * BLOCK] ^= 1

    calls = count()
    assert list(resting(partial(map, memoryview, arrays), threading.Event(), half_a_step)) == []


def test_what_never_changes_is_sent_in_the_end() -> None:
    arrays, steps = [array(2, 1)], []
    found = list(resting(partial(map, memoryview, arrays), threading.Event(), steps.append))
    assert b"".join(found) == arrays[0]
    assert len(steps) == 10


@pytest.mark.parametrize("arrays", [[], [bytearray()]], ids=["none", "empty"])
def test_states_without_arrays_take_no_time(arrays: list[bytearray]) -> None:
    def fail(stopped: threading.Event) -> None:
        raise AssertionError("waits for a step")

    assert list(resting(partial(map, memoryview, arrays), threading.Event(), fail)) == []


def test_a_search_can_be_given_up() -> None:
    stopped = threading.Event()
    arrays = [array(2)]
    await_step = lambda stopped: stopped.set()  # noqa: E731
    assert list(resting(partial(map, memoryview, arrays), stopped, await_step)) == []


# ---- how ----


class Member:
    """Notes what perseusrun is told."""

    def __init__(self) -> None:
        self.told: list[words.Fed] = []

    def tell(self, word: words.Fed) -> None:
        self.told.append(word)

    def wait_for_end(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.told) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    secret = "s" * 32
    server = _core.StoreServer("127.0.0.1", 0, False, secret.encode())
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_PORT", str(server.port))
    monkeypatch.setenv("PERSEUS_SECRET", secret)
    yield
    server.close()


def parts(size: int) -> list[tuple[Member, Feeding]]:
    members = [Member() for _ in range(size)]
    return [(member, Feeding(member)) for member in members]  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_new_ranks_get_the_blocks(
    store: None, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSEUS_TRANSPORT", transport)
    arrays = [array(700, 9), array(1)]  # several messages
    expected = {bytes(arrays[0][i : i + BLOCK]) for i in range(0, 700 * BLOCK, BLOCK)}
    ranks = parts(3)
    ranks[0][1].contents = lambda: map(memoryview, arrays)
    with running(Training(arrays, [(0, 700 * BLOCK), (1, 3)]), ranks[0][1]):
        for rank, (_, part) in enumerate(ranks):
            part.take_part(words.Feed(5, rank, 3))
        for (member, part), count in zip(ranks, (1, 2, 2), strict=True):
            member.wait_for_end(count)
            part.stop()
    for member, part in ranks[1:]:
        assert set(part.blocks.values()) == expected
        assert {_core.hash_blocks(block, BLOCK): block for block in part.blocks.values()} == (
            part.blocks
        )
        assert member.told == [words.Fed(5, 1), words.Fed(5, 700)]
    assert ranks[0][0].told == [words.Fed(5, 700)]
    assert not ranks[0][1].blocks


def test_a_feed_without_anything_to_send_ends(store: None) -> None:
    arrays = [array(1)]
    ranks = parts(2)
    ranks[0][1].contents = lambda: map(memoryview, arrays)
    with running(Training(arrays, [(0, 0)]), ranks[0][1]):
        for rank, (_, part) in enumerate(ranks):
            part.take_part(words.Feed(1, rank, 2))
        for member, part in ranks:
            member.wait_for_end(1)
            part.stop()
            assert member.told == [words.Fed(1, 0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_waits_for_the_other_is_given_up_at_once(store: None, rank: int) -> None:
    ((member, part),) = parts(1)
    part.contents = lambda: [memoryview(b"x")]
    part.take_part(words.Feed(1, rank, 2))
    time.sleep(0.3)
    began = time.monotonic()
    part.stop()
    assert time.monotonic() < began + 5
    assert member.told == [words.Fed(1, 0)]


def test_stopping_one_ends_the_other(store: None) -> None:
    arrays = [array(20_000), array(1)]
    ranks = parts(2)
    ranks[0][1].contents = lambda: map(memoryview, arrays)
    with running(Training(arrays, [(1, 3)]), ranks[0][1]):
        for rank, (_, part) in enumerate(ranks):
            part.take_part(words.Feed(1, rank, 2))
        ranks[1][0].wait_for_end(1)  # it has got the first block
        ranks[1][1].stop()
        ranks[0][0].wait_for_end(1)
    ranks[0][1].stop()
    got = len(ranks[1][1].blocks)
    assert 0 < got < 20_000
    assert ranks[1][0].told[-1] == words.Fed(1, got)


def test_a_part_whose_thread_cannot_be_started_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, part),) = parts(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            part.take_part(words.Feed(1, 0, 2))
    part.stop()


def test_a_process_that_ends_takes_no_part() -> None:
    ((_, part),) = parts(1)
    part.close()
    with pytest.raises(RuntimeError, match="ends"):
        part.take_part(words.Feed(1, 0, 2))


# ---- when who is told to ----


class Job:
    """The processes of a job: host and rank of each, -1 for new ones that have asked to join."""

    def __init__(self, *places: tuple[str, int]) -> None:
        hosts: dict[tuple[str, bool], SimpleNamespace] = {}
        self.told: list[tuple[int, words.Feed]] = []
        self.processes = []
        for number, (name, rank) in enumerate(places):
            # New processes have another agent.
            agent = SimpleNamespace(name=name, running=set())
            host = hosts.setdefault((name, rank < 0), agent)
            host.running.add(number)
            epoch = 0 if rank >= 0 else -1
            self.processes.append(Process(number, (name, number), host, epoch, rank))  # type: ignore[arg-type]
        self.feeds = Feeds(lambda process, word: self.told.append((process.number, word)))  # type: ignore[arg-type]

    @property
    def members(self) -> list[Process]:
        return [each for each in self.processes if each.rank >= 0]

    @property
    def new(self) -> list[Process]:
        return [each for each in self.processes if each.rank < 0]

    def begin(self, now: float = 0.0, *, loading: Sequence[Process] = ()) -> None:
        new = [each for each in self.new if each not in loading]
        self.feeds.begin(self.members, new, list(loading), now)

    def under_way(self, now: float = 0.0) -> bool:
        return self.feeds.are_under_way(self.processes, now)


def test_new_ranks_of_a_host_are_fed_together_by_one_who_is_near() -> None:
    job = Job(("a", 0), ("b", 1), ("c", -1), ("c", -1), ("b", -1))
    job.begin()
    assert job.told == [
        (0, words.Feed(1, 0, 3)),
        (2, words.Feed(1, 1, 3)),
        (3, words.Feed(1, 2, 3)),
        (1, words.Feed(2, 0, 2)),
        (4, words.Feed(2, 1, 2)),
    ]
    job.begin()
    assert len(job.told) == 5, "nobody is fed twice"


def test_survivors_share_the_work() -> None:
    job = Job(("a", 0), ("b", 1), ("c", -1), ("d", -1), ("e", -1))
    job.begin()
    assert [number for number, feed in job.told if feed.rank == 0] == [0, 1, 0]


def test_those_that_will_ask_at_once_are_waited_for() -> None:
    job = Job(("a", 0), ("c", -1), ("c", -1))
    job.begin(10.0, loading=job.processes[2:])
    assert not job.told
    assert job.under_way(10.9), "the first one is not admitted alone"
    job.begin(10.9)
    assert [number for number, _ in job.told] == [0, 1, 2]


def test_those_that_take_longer_are_fed_later() -> None:
    job = Job(("a", 0), ("c", -1), ("c", -1))
    job.begin(10.0, loading=job.processes[2:])
    job.begin(11.0, loading=job.processes[2:])
    assert [number for number, _ in job.told] == [0, 1]
    job.feeds.forget()  # the first one is in a world
    assert not job.under_way(12.0)
    first = job.processes[1]
    first.epoch, first.rank, first.feed = 1, 1, None
    job.begin(13.0)
    assert job.told[2:] == [(1, words.Feed(2, 0, 2)), (2, words.Feed(2, 1, 2))]


def test_a_feed_lasts_until_the_survivor_has_done_its_part() -> None:
    job = Job(("a", 0), ("c", -1))
    survivor, new = job.processes
    job.begin()
    job.feeds.on_fed(new, words.Fed(1, 1))
    assert job.under_way()
    assert new.fed
    job.feeds.on_fed(survivor, words.Fed(1, 30))
    assert not job.under_way()
    assert not survivor.fed


@pytest.mark.parametrize("dead", [0, 1])
def test_a_feed_ends_with_either_side(dead: int) -> None:
    job = Job(("a", 0), ("c", -1))
    job.begin()
    del job.processes[dead]
    assert not job.under_way()


def test_feeds_hold_up_nobody_for_ever() -> None:
    job = Job(("a", 0), ("c", -1), ("d", -1))
    job.begin(100.0, loading=job.processes[2:])
    job.begin(500.0)  # a later one does not begin the time anew
    assert job.under_way(699.0)
    assert not job.under_way(700.0)


def test_the_end_of_a_feed_that_a_world_has_cut_short_counts_for_nothing() -> None:
    job = Job(("a", 0), ("c", -1))
    job.begin()
    job.feeds.forget()
    job.processes[1].feed = None
    job.feeds.on_fed(job.processes[1], words.Fed(1, 5))
    assert not job.processes[1].fed


# ---- news that wait for a feed ----


@pytest.mark.parametrize(
    ("change", "feeding", "seconds", "acts"),
    [
        (HostUpdateResult.added, True, 1.0, False),
        (HostUpdateResult.added, False, 1.0, True),
        (HostUpdateResult.added, True, 6.0, True),
        (HostUpdateResult.removed, True, 1.0, True),
        (HostUpdateResult.mixed, True, 1.0, True),
    ],
    ids=["feeding", "not-feeding", "rare", "removed", "mixed"],
)
def test_ranks_that_commit_often_let_new_ones_be_fed(
    change: HostUpdateResult, feeding: bool, seconds: float, acts: bool, monkeypatch: Any
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(states, "time", clock)
    monkeypatch.setattr(notification_manager, "is_feeding", feeding)
    state = ObjectState(lambda obj: obj, lambda: 0, step=0)
    now = 100.0
    state.check_host_updates()
    state.on_hosts_updated(1.0, change)
    now += seconds
    if acts:
        with pytest.raises(errors.HostsUpdatedInterrupt):
            state.check_host_updates()
    else:
        state.check_host_updates()
        state.check_host_updates()
        notification_manager.is_feeding = False
        with pytest.raises(errors.HostsUpdatedInterrupt):
            state.check_host_updates()


def test_ranks_that_look_for_the_first_time_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification_manager, "is_feeding", True)
    state = ObjectState(lambda obj: obj, lambda: 0)
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    with pytest.raises(errors.HostsUpdatedInterrupt):
        state.check_host_updates()
