"""Which hosts and slots an elastic job finds and uses, and which ranks its processes get."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from perseusrun_command import alive, eventually

from perseus.run.elastic import discovery
from perseus.run.elastic.discovery import HostDiscoveryFunction, HostDiscoveryScript, Watch
from perseus.run.elastic.ranking import Candidate, ranked
from perseus.run.elastic.slots import UsableSlots
from perseus.run.hosts import Host, Slot, parse_discovered, place

# ---- ranks ----


def _numbers(result: list[tuple[Candidate, Slot]]) -> list[int]:
    return [candidate.number for candidate, _ in result]


def test_new_processes_in_order_are_placed_as_in_a_job_that_is_not_elastic() -> None:
    hosts = [Host("a", 1), Host("b", 3), Host("c", 2)]
    slots = [(host.name, index) for host in hosts for index in range(host.slots)]
    candidates = [Candidate(number, *slot, None) for number, slot in enumerate(slots)]
    result = ranked(candidates)
    assert [slot for _, slot in result] == place(hosts, 6)
    assert [candidate for candidate, _ in result] == candidates


def test_survivors_keep_their_order_and_come_before_new_processes_of_their_host() -> None:
    result = ranked(
        [
            Candidate(8, "a", 2, None),
            Candidate(9, "a", 0, None),
            Candidate(2, "a", 3, 1),
            Candidate(7, "a", 1, 0),
        ]
    )
    assert _numbers(result) == [7, 2, 8, 9]
    assert [slot.rank for _, slot in result] == [0, 1, 2, 3]


def test_hosts_with_survivors_come_first_in_the_order_of_their_lowest_rank() -> None:
    result = ranked(
        [
            Candidate(3, "new", 0, None),
            Candidate(4, "late", 0, 5),
            Candidate(5, "early", 1, 6),
            Candidate(6, "early", 0, 2),
        ]
    )
    assert _numbers(result) == [6, 5, 4, 3]


def test_rank_0_is_a_survivor_if_a_new_process_has_the_first_slot_of_the_first_host() -> None:
    result = ranked([Candidate(4, "a", 0, None), Candidate(1, "a", 1, 1), Candidate(2, "b", 0, 2)])
    assert _numbers(result) == [1, 4, 2]
    assert [slot.local_rank for _, slot in result] == [1, 0, 0]


def test_ranks_of_a_host_are_consecutive_even_if_they_were_not_before() -> None:
    result = ranked([Candidate(n, "ab"[n % 2], n // 2, n) for n in range(4)])
    assert [(slot.rank, slot.host) for _, slot in result] == list(enumerate("aabb"))
    assert _numbers(result) == [0, 2, 1, 3]


def test_local_ranks_follow_the_slots_and_leave_no_gap() -> None:
    result = ranked([Candidate(0, "a", 7, 0), Candidate(1, "a", 2, 1), Candidate(2, "a", 4, None)])
    assert [slot.local_rank for _, slot in result] == [2, 0, 1]
    assert {slot.local_size for _, slot in result} == {3}


def test_new_rank_gets_a_local_rank_with_which_no_survivor_has_begun() -> None:
    """As if it were the GPU that it takes: slots 0 and 1 of four have failed and come back."""
    two, three = Candidate(2, "a", 2, 0, 0, 2), Candidate(3, "a", 3, 1, 0, 3)
    assert _local(two, three) == {2: 0, 3: 1}
    assert _local(two, three, Candidate(4, "a", 1, None)) == {4: 0, 2: 2, 3: 1}
    four = Candidate(4, "a", 1, 2, 0, 0)
    assert _local(two, three, four, Candidate(5, "a", 0, None)) == {5: 1, 4: 0, 2: 2, 3: 3}


def _local(*candidates: Candidate) -> dict[int, int]:
    return {candidate.number: slot.local_rank for candidate, slot in ranked(candidates)}


def test_gpus_of_living_ranks_differ_whatever_fails() -> None:
    source = random.Random(11)
    firsts: dict[int, int] = {}  # by slot
    for _ in range(1000):
        slots = source.sample(range(6), source.randint(1, 6))
        firsts = {slot: first for slot, first in firsts.items() if slot in slots}
        world = ranked([Candidate(n, "a", n, n, 0, firsts.get(n)) for n in slots])
        assert sorted(slot.local_rank for _, slot in world) == list(range(len(slots)))
        firsts |= {each.slot: slot.local_rank for each, slot in world if each.slot not in firsts}
        assert len(set(firsts.values())) == len(firsts)


def test_cross_ranks_of_unequal_hosts_count_owners_of_a_local_rank() -> None:
    slots = [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1)]
    result = ranked([Candidate(n, *slot, n) for n, slot in enumerate(slots)])
    found = [(s.host, s.local_rank, s.cross_rank, s.cross_size) for _, s in result]
    assert found == [
        ("a", 0, 0, 3), ("b", 0, 1, 3), ("b", 1, 0, 2), ("b", 2, 0, 1), ("c", 0, 2, 3),
        ("c", 1, 1, 2),
    ]  # fmt: skip


def test_nobody_has_no_ranks() -> None:
    assert ranked([]) == []


def _random_candidates(source: random.Random) -> list[Candidate]:
    slots = [(host, index) for host in "abcde"[: source.randint(1, 5)] for index in range(4)]
    chosen = source.sample(slots, source.randint(1, len(slots)))
    numbers = source.sample(range(100), len(chosen))
    ranks = source.sample(range(100), len(chosen))
    share = source.choice([0.0, 0.3, 0.7, 1.0])
    return [
        Candidate(number, host, slot, rank if source.random() < share else None)
        for number, (host, slot), rank in zip(numbers, chosen, ranks, strict=True)
    ]


def test_any_candidates_get_consistent_identities() -> None:
    source = random.Random(7)
    for _ in range(1000):
        _check(_random_candidates(source))


def _check(candidates: list[Candidate]) -> None:
    result = ranked(candidates)
    assert sorted(_numbers(result)) == sorted(each.number for each in candidates)
    assert [slot.rank for _, slot in result] == list(range(len(candidates)))
    assert all(candidate.host == slot.host for candidate, slot in result)

    members = {
        host: [candidate for candidate, _ in group]
        for host, group in groupby(result, key=lambda pair: pair[1].host)
    }
    assert sum(map(len, members.values())) == len(result), "a host's ranks are not consecutive"
    for those in members.values():
        survivors = [each.rank for each in those if each.rank is not None]
        assert survivors == sorted(survivors)
        newcomers = [each.number for each in those[len(survivors) :]]
        assert all(each.rank is None for each in those[len(survivors) :])
        assert newcomers == sorted(newcomers)
    firsts = [those[0] for those in members.values()]
    ages = [(each.rank is None, each.number if each.rank is None else each.rank) for each in firsts]
    assert ages == sorted(ages)

    by_slot = sorted(result, key=lambda pair: (pair[0].host, pair[0].slot))
    for _, group in groupby(by_slot, key=lambda pair: pair[0].host):
        local_ranks = [slot.local_rank for _, slot in group]
        assert local_ranks == list(range(len(local_ranks)))
    expected = place([Host(host, len(those)) for host, those in members.items()], len(result))
    assert _identities([slot for _, slot in result]) == _identities(expected)


def _identities(slots: list[Slot]) -> list[tuple[str, int, int, int, int]]:
    return sorted((s.host, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots)


# ---- slots ----


def _slots(*hosts: Host, cooldown: tuple[float, float] | None = None) -> UsableSlots:
    slots = UsableSlots(cooldown)
    slots.discover(hosts)
    return slots


def test_slots_come_host_by_host_in_the_order_of_discovery() -> None:
    slots = _slots(Host("b", 2), Host("a", 1))
    assert slots.usable(0.0) == [("b", 0), ("b", 1), ("a", 0)]
    assert [slots.slots_of(name) for name in "abc"] == [1, 2, 0]


def test_hosts_keep_the_order_of_first_sight_when_they_vanish_and_return() -> None:
    slots = _slots(Host("b", 1), Host("a", 1))
    slots.discover([Host("c", 1), Host("a", 1)])
    assert slots.usable(0.0) == [("a", 0), ("c", 0)]
    slots.discover([Host("c", 1), Host("a", 1), Host("b", 1)])
    assert slots.usable(0.0) == [("b", 0), ("a", 0), ("c", 0)]


def test_discovery_tells_whether_hosts_or_slots_have_changed() -> None:
    slots = UsableSlots(None)
    assert not slots.discover([])
    assert slots.discover([Host("a", 1), Host("b", 1)])
    assert not slots.discover([Host("b", 1), Host("a", 1)])
    assert slots.discover([Host("a", 2), Host("b", 1)])
    assert slots.discover([Host("a", 2)])
    assert slots.discover([])


def test_host_without_slots_is_as_good_as_none() -> None:
    slots = UsableSlots(None)
    assert not slots.discover([Host("a", 0)])
    assert slots.usable(0.0) == [] and slots.slots_of("a") == 0
    assert slots.discover([Host("b", 1), Host("a", 1)])
    assert slots.usable(0.0) == [("b", 0), ("a", 0)]


def test_fewer_slots_take_the_last_ones_away() -> None:
    slots = _slots(Host("a", 3))
    slots.discover([Host("a", 1)])
    assert slots.usable(0.0) == [("a", 0)]


def test_fewer_slots_take_failed_ones_away_first() -> None:
    """A script that prints how many GPUs of a host work has one less after a failure."""
    slots = _slots(Host("a", 3), Host("b", 2))
    slots.bar(("a", 0), 0.0)
    slots.discover([Host("a", 2), Host("b", 1)])
    assert slots.usable(0.0) == [("a", 1), ("a", 2), ("b", 0)]
    slots.bar(("a", 2), 0.0)
    assert slots.usable(0.0) == [("a", 1), ("b", 0)]
    for hosts in ([], [Host("a", 1)]):
        slots.discover(hosts)
    assert slots.usable(0.0) == [("a", 1)]
    slots.discover([Host("a", 4)])
    assert slots.usable(0.0) == [("a", 1), ("a", 3)]


def test_failed_slot_is_never_used_again_without_a_cooldown() -> None:
    slots = _slots(Host("a", 2), Host("b", 1))
    assert slots.bar(("a", 0), 5.0) is None
    assert slots.usable(1e9) == [("a", 1), ("b", 0)]
    assert slots.next_return(5.0) is None
    assert slots.slots_of("a") == 2
    slots.discover([Host("b", 1)])
    slots.discover([Host("a", 2), Host("b", 1)])
    assert ("a", 0) not in slots.usable(1e9)


def test_failed_slot_returns_when_its_cooldown_is_over() -> None:
    slots = _slots(Host("a", 2), cooldown=(10.0, 100.0))
    wait = slots.bar(("a", 0), 50.0)
    assert wait is not None and 10.0 <= wait <= 11.0
    assert slots.usable(50.0 + wait - 0.01) == [("a", 1)]
    assert slots.next_return(50.0) == 50.0 + wait
    assert slots.usable(50.0 + wait) == [("a", 0), ("a", 1)]
    assert slots.next_return(50.0 + wait) is None


def test_cooldown_doubles_with_each_failure_of_the_slot_up_to_the_longest() -> None:
    slots = _slots(Host("a", 2), cooldown=(10.0, 60.0))
    waits = [slots.bar(("a", 0), 1000.0 * n) for n in range(5)]
    assert all(
        wait is not None and shortest <= wait <= shortest + 1.0
        for wait, shortest in zip(waits, (10.0, 20.0, 40.0), strict=False)
    )
    assert waits[3:] == [60.0, 60.0]
    other = slots.bar(("a", 1), 0.0)
    assert other is not None and other <= 11.0


def test_hosts_that_failed_together_do_not_return_together() -> None:
    slots = _slots(Host("a", 30), cooldown=(10.0, 60.0))
    assert len({slots.bar(("a", index), 0.0) for index in range(30)}) > 1


def test_cooldown_of_one_length_stays_that_long() -> None:
    slots = _slots(Host("a", 1), cooldown=(7.0, 7.0))
    assert [slots.bar(("a", 0), 0.0) for _ in range(10)] == [7.0] * 10


def test_cooldown_stays_finite_for_a_slot_that_fails_thousands_of_times() -> None:
    slots = _slots(Host("a", 1), cooldown=(1.0, 60.0))
    assert [slots.bar(("a", 0), 0.0) for _ in range(3000)][-1] == 60.0


def test_next_return_is_the_earliest_of_slots_that_still_exist() -> None:
    slots = _slots(Host("a", 2), Host("b", 1), cooldown=(10.0, 10.0))
    for now, slot in ((0.0, ("a", 1)), (1.0, ("b", 0)), (2.0, ("a", 0))):
        slots.bar(slot, now)
    assert slots.next_return(3.0) == 10.0
    slots.discover([Host("b", 1)])
    assert slots.next_return(3.0) == 11.0
    slots.discover([Host("a", 1)])  # the slot that returns first
    assert slots.next_return(3.0) == 10.0
    assert slots.next_return(10.0) is None
    slots.discover([])
    assert slots.next_return(3.0) is None


# ---- what a discovery script prints ----


def test_printed_hosts_may_have_a_number_of_slots_or_the_usual_one() -> None:
    text = "\na:2\n  b  \n\nme@c:3\n[fe80::1]\n[fe80::2]:5\n"
    expected = [Host("a", 2), Host("b", 4), Host("me@c", 3), Host("fe80::1", 4), Host("fe80::2", 5)]
    assert parse_discovered(text, 4, "find") == expected
    assert parse_discovered("\n \n", None, "find") == []


def test_slots_of_a_host_printed_twice_add_up() -> None:
    assert parse_discovered("a:2\nb\na\n", 3, "find") == [Host("a", 5), Host("b", 3)]


def test_a_line_that_is_printed_again_adds_no_slots() -> None:
    text = "a:2\nb:1\n a:2\na:1\nb:1\n"
    assert parse_discovered(text, None, "find") == [Host("a", 3), Host("b", 1)]


@pytest.mark.parametrize("line", ["a:", "a:x", ":2", "a b", "a slots=2", "-oProxyCommand=x:2", "#"])
def test_bad_printed_line_is_named_with_script_and_number(line: str) -> None:
    with pytest.raises(ValueError, match=r"--host-discovery-script \./find, line 3: '") as caught:
        parse_discovered(f"a:2\n\n{line}\n", 1, "./find")
    assert f"'{line}': expected name or name:slots" in str(caught.value)


def test_printed_host_with_no_slots_is_left_out() -> None:
    assert parse_discovered("a:0\nb:2", 1, "find") == [Host("b", 2)]


def test_missing_number_of_slots_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"script find, line 2: 'b' .* --slots-per-host"):
        parse_discovered("a:2\nb\n", None, "find")


# ---- discovery ----


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "find"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return str(path)

    return write


def test_script_tells_the_hosts(script: Callable[[str], str]) -> None:
    path = script("echo a:2; echo b; echo noise >&2")
    assert HostDiscoveryScript(path, 3).find() == [Host("a", 2), Host("b", 3)]
    with pytest.raises(ValueError, match=r"find, line 2: 'b' has no number of slots"):
        HostDiscoveryScript(path, None).find()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo a:2; echo first >&2; echo last words >&2; exit 3", "exit status 3: last words"),
        ("exit 4", "exit status 4: it printed nothing to stderr"),
    ],
)
def test_script_that_fails_is_quoted(script: Callable[[str], str], text: str, message: str) -> None:
    path = script(text)
    with pytest.raises(ValueError) as caught:
        HostDiscoveryScript(path, 1).find()
    assert str(caught.value) == f"--host-discovery-script {path}: {message}"


def test_script_whose_exit_status_would_be_lost_is_not_asked() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ValueError, match=r"find: nobody can tell .* ignores SIGCHLD"):
            HostDiscoveryScript("find", 1).find()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_script_that_cannot_run_is_named(tmp_path: Path, script: Callable[[str], str]) -> None:
    path = script("echo a:1")
    Path(path).chmod(0o644)
    with pytest.raises(ValueError, match=rf"--host-discovery-script {path}: .* Permission denied"):
        HostDiscoveryScript(path, 1).find()
    with pytest.raises(ValueError, match=r"--host-discovery-script .*nowhere: .* not found"):
        HostDiscoveryScript(str(tmp_path / "nowhere"), 1).find()


def test_script_may_have_arguments(script: Callable[[str], str]) -> None:
    assert HostDiscoveryScript(f"{script('echo $1:$2')} a 3", None).find() == [Host("a", 3)]


def test_closing_ends_the_script_and_what_it_has_started(tmp_path: Path) -> None:
    source = HostDiscoveryScript(f"sleep 300 & echo $! > {tmp_path}/pid; wait", 1)

    def find() -> None:
        with pytest.raises(ValueError, match="exit status -9"):
            source.find()

    finding = threading.Thread(target=find)
    finding.start()
    assert eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 10)
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    source.close()
    finding.join(10)
    assert not finding.is_alive() and eventually(lambda: not alive(pid), 10)


def test_script_that_does_not_answer_is_given_up(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_SCRIPT_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"find: no answer within 0\.2 s"):
        HostDiscoveryScript(script("exec sleep 30"), 1).find()


def test_script_that_leaves_a_process_with_its_output_is_given_up(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "_SCRIPT_SECONDS", 0.2)
    found = HostDiscoveryScript(
        script(f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' & echo a:2"), None
    )
    try:
        with pytest.raises(ValueError, match=r"no answer within 0\.2 s: .* has started"):
            found.find()
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_script_that_did_not_answer_once_is_asked_again(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    found = HostDiscoveryScript(script(f"if [ -e {slow} ]; then exec sleep 30; fi; echo a:2"), None)
    monkeypatch.setattr(discovery, "_SCRIPT_SECONDS", 0.2)
    with pytest.raises(ValueError, match="no answer"):
        found.find()
    slow.unlink()
    monkeypatch.setattr(discovery, "_SCRIPT_SECONDS", 60.0)
    assert found.find() == [Host("a", 2)]


def test_function_tells_the_hosts() -> None:
    assert HostDiscoveryFunction(lambda: {"a": 2, "b": 1}).find() == [Host("a", 2), Host("b", 1)]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: {}["cloud"], r"KeyError\('cloud'\)"),
        (lambda: {"a": "many"}, "ValueError.*'many'"),
        (lambda: None, "AttributeError"),
        (lambda: sys.exit(3), r"SystemExit\(3\)"),
    ],
)
def test_function_that_fails_is_a_value_error_with_its_reason(
    function: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"the function that discovers hosts failed: {reason}"):
        HostDiscoveryFunction(function).find()


class Cloud:
    """A source of hosts whose answer the test sets; an exception is raised."""

    may_change = True

    def __init__(self) -> None:
        self.answer: list[Host] | ValueError = [Host("a", 1)]
        self.questions = 0
        self.is_closed = False
        self.thread = threading.current_thread()

    def find(self) -> list[Host]:
        self.questions += 1
        self.thread = threading.current_thread()
        if isinstance(self.answer, ValueError):
            raise self.answer
        return list(self.answer)

    def close(self) -> None:
        self.is_closed = True

    def is_asked_again(self) -> bool:
        """Whether two more questions come: the answer to the first one has been taken then."""
        goal = self.questions + 2
        return eventually(lambda: self.questions >= goal, 10)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr(discovery, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(discovery, "is_local", lambda name: name == "a")
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def _woken(wake: int) -> bool:
    """Whether bytes arrive within some time; reads them."""
    return bool(select.select([wake], [], [], 10)[0]) and bool(os.read(wake, 100))


def test_watch_has_no_hosts_before_the_first_answer(pipe: tuple[int, int]) -> None:
    cloud = Cloud()
    cloud.answer = ValueError("the cloud is down")
    with Watch(cloud, pipe[1]) as watch:
        assert _woken(pipe[0])
        assert (watch.hosts(), watch.complaint()) == (None, "the cloud is down")


def test_watch_looks_names_up_once_before_the_launcher_learns_them(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    has_answered = threading.Event()

    def is_local(name: str) -> bool:
        asked.append(name)
        return has_answered.wait(30) and name == "a"

    monkeypatch.setattr(discovery, "is_local", is_local)
    cloud = Cloud()
    with Watch(cloud, pipe[1]) as watch:
        assert eventually(lambda: asked == ["a"], 10)
        assert watch.hosts() is None
        has_answered.set()
        assert _woken(pipe[0])
        cloud.answer = [Host("b", 1), Host("a", 1)]
        assert _woken(pipe[0])
        assert cloud.is_asked_again()
        assert (watch.is_local("a"), watch.is_local("b")) == (True, False)
    assert asked == ["a", "b"]


def test_watch_wakes_the_launcher_for_each_change_only(pipe: tuple[int, int]) -> None:
    cloud = Cloud()
    with Watch(cloud, pipe[1]) as watch:
        assert _woken(pipe[0])
        assert watch.hosts() == [Host("a", 1)]
        assert cloud.is_asked_again()
        assert not select.select([pipe[0]], [], [], 0)[0]
        for hosts in ([Host("a", 1), Host("b", 2)], []):
            cloud.answer = hosts
            assert _woken(pipe[0])
            assert watch.hosts() == hosts
        assert watch.complaint() == ""


def test_watch_keeps_the_hosts_and_complains_while_discovery_fails(pipe: tuple[int, int]) -> None:
    cloud = Cloud()
    with Watch(cloud, pipe[1]) as watch:
        assert _woken(pipe[0])
        cloud.answer = ValueError("the cloud is down")
        assert _woken(pipe[0])
        assert (watch.hosts(), watch.complaint()) == ([Host("a", 1)], "the cloud is down")
        assert cloud.is_asked_again()
        assert not select.select([pipe[0]], [], [], 0)[0], "it wakes for every failure"
        cloud.answer = [Host("a", 1)]
        assert _woken(pipe[0])
        assert (watch.hosts(), watch.complaint()) == ([Host("a", 1)], "")


def test_watch_goes_on_if_the_launcher_is_too_busy_to_read(pipe: tuple[int, int]) -> None:
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe[1], bytes(1 << 16))
    cloud = Cloud()
    with Watch(cloud, pipe[1]) as watch:
        for hosts in ([Host("b", 1)], [Host("c", 1)]):
            cloud.answer = hosts
            assert cloud.is_asked_again()
            assert watch.hosts() == hosts


def test_watch_ends_with_its_block(pipe: tuple[int, int]) -> None:
    cloud = Cloud()
    with Watch(cloud, pipe[1]):
        assert cloud.is_asked_again()
        assert cloud.thread is not threading.current_thread()
    assert cloud.is_closed
    cloud.thread.join(10)
    assert not cloud.thread.is_alive()
