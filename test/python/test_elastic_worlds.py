"""Which worlds an elastic job begins, and what becomes of processes that are in none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.elastic import HostUpdateResult
from perseus.run import launch
from perseus.run.bootstrap.words import Begun, Join, Loop, News
from perseus.run.elastic import driver
from perseus.run.elastic.cohort import Cohort
from perseus.run.elastic.discovery import HostDiscoveryFunction
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.elastic.process import Process
from perseus.run.hosts import Host, Slot
from perseus.run.job import Job, LaunchError

NEW = Join(sync=True, state=False, commits=0)
HOST: Any = SimpleNamespace(
    name="a", send=lambda _: None, given_job=True, hello="hello", gone=False
)


@pytest.fixture
def launcher() -> Iterator[driver.ElasticLauncher]:
    """One in world 1, whose ranks have the training's state, on three slots of host a."""
    made = driver.ElasticLauncher(
        Job(["true"], []), Elasticity(HostDiscoveryFunction(dict), 1, 1, cooldown=(1.0, 1.0))
    )
    made._slots.discover([Host("a", 3)])
    made._epoch, made._state_exists = 1, True
    yield made
    made._release()


def test_exit_status_is_that_of_the_last_world_when_nobody_has_the_state(
    launcher: driver.ElasticLauncher,
) -> None:
    earlier, last = (Process(number, ("a", number), HOST, number, 0) for number in (0, 1))
    launcher._failures = [(earlier, 5), (last, 6)]
    launcher._processes = {2: Process(2, ("a", 2), HOST, request=NEW)}
    launcher._begin_world()
    assert launcher.first_failure == (1, 6)


@pytest.mark.parametrize(
    ("faulty", "new", "leave"),
    [
        ({2}, {2}, {2}),
        ({1, 2}, {2}, {2}),  # an old rank had a world without the new one
        ({0}, {1, 2}, {1, 2}),
        ({1}, set(), {1}),
        (set(), {2}, {2}),  # the old ones have waited for it in vain
        (set(), set(), set()),
        (set(), {0, 1, 2}, set()),
        ({0, 1, 2}, set(), set()),  # too few would remain: what is wrong may pass
    ],
)
def test_ranks_leave_whose_own_errors_have_ended_three_starts(
    launcher: driver.ElasticLauncher, faulty: set[int], new: set[int], leave: set[int]
) -> None:
    launcher._processes = {
        number: Process(number, ("a", number), HOST, 1, number, is_new=number in new)
        for number in range(3)
    }
    for number in range(3):
        launcher._open_streams(number, number)
    launcher._world = [(number, Slot(number, "a", number, 3, 0, 1)) for number in range(3)]
    for start in range(3):
        assert not any(each.dismissed for each in launcher._processes.values()), start
        for number, each in launcher._processes.items():
            each.request = Join(True, True, 0, number in faulty)
        launcher._begin_world()
        assert launcher._epoch == 2 + start
    left = {number for number, each in launcher._processes.items() if each.dismissed}
    assert left == leave
    assert {number for number, _ in launcher._world} == {0, 1, 2} - leave


def test_the_end_of_a_rank_is_no_error_of_those_that_were_to_begin_with_it(
    launcher: driver.ElasticLauncher,
) -> None:
    launcher._processes = {0: Process(0, ("a", 0), HOST, 1, 0)}
    launcher._open_streams(0, 0)
    for _ in range(5):
        launcher._world = [(number, Slot(number, "a", number, 2, 0, 1)) for number in range(2)]
        launcher._processes[0].request = Join(True, True, 0, True)
        launcher._begin_world()
    assert not launcher._processes[0].dismissed


@pytest.mark.parametrize("begins", [False, True])
def test_starts_that_fail_for_ever_end_the_job_and_are_no_resets(
    launcher: driver.ElasticLauncher, begins: bool
) -> None:
    """begins: whether each world does."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 1, 1, reset_limit=3)
    launcher._processes = {0: Process(0, ("a", 0), HOST, 1, 0)}
    launcher._open_streams(0, 0)
    started = -1
    while not launcher._ending:
        launcher._processes[0].request = Join(True, True, 0, False)
        launcher._begin_world()
        started += 1
        if begins:
            for _ in range(2):
                launcher._on_word(launcher._processes[0], Begun(launcher._epoch))
    assert started == (4 if begins else 38)
    reason = "exceeded limit: 3" if begins else "40 worlds in a row did not begin"
    assert reason in str(launcher._error)


def test_a_new_process_whose_output_file_cannot_be_made_starts_without_it(
    launcher: driver.ElasticLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As where the disk is full; before the first world, that is an error."""
    (tmp_path / "rank.2").touch()
    launcher._job = replace(launcher._job, output_directory=str(tmp_path))
    monkeypatch.setattr(launcher, "_connect", lambda *_: SimpleNamespace())
    launcher._started = 2
    launcher._start_at("a", [("a", 2), ("a", 0)], Cohort(0.0))
    assert sorted(launcher._processes) == [2, 3]
    for number in launcher._processes:
        launcher._streams[number, b"o"].feed(b"line of %d\n" % number)
    assert (tmp_path / "rank.3" / "stdout").read_text() == "[3]<stdout>:line of 3\n"
    found = capfd.readouterr()
    assert found.out == "[2]<stdout>:line of 2\n[3]<stdout>:line of 3\n"
    assert found.err == (
        f"perseusrun: warning: cannot write {tmp_path}/rank.2/stdout: File exists; the job goes "
        f"on, and output that cannot be written is lost\n"
    )
    launcher._close_streams([2, 3])
    launcher._epoch, launcher._started = -1, 2
    with pytest.raises(LaunchError, match="File exists"):
        launcher._start_at("a", [("a", 2)], Cohort(0.0))


@pytest.mark.parametrize("most", [None, 2])
def test_new_processes_without_a_slot_are_let_go_before_the_next_world(
    launcher: driver.ElasticLauncher, most: int | None
) -> None:
    """Either discovery has withdrawn their host, or enough others have come."""
    lost = "b" if most is None else "a"
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 1, 1, most)
    hosts = [Host("a", 2 if most is None else 4)]
    vars(launcher)["_watch"] = SimpleNamespace(hosts=lambda: hosts, complaint=lambda: "")
    sent: list[bytes] = []
    link: Any = SimpleNamespace(**vars(HOST) | {"send": sent.append})
    launcher._processes = {
        0: Process(0, ("a", 0), HOST, 1, 0),
        1: Process(1, ("a", 1), HOST, 1, 1),
        2: Process(2, (lost, 2), link, request=NEW),
        3: Process(3, (lost, 3), link),
    }
    for _ in range(2):
        launcher._step(time.monotonic(), time.monotonic())
    assert [each.dismissed for each in launcher._processes.values()] == [False, False, True, True]
    assert [line.split()[:2] for line in sent] == [[b"TELL", b"2"], [b"END", b"3"]]


def _sent_to(link: Any) -> list[list[bytes]]:
    return [line.split(maxsplit=2) for line in link.sent]


@pytest.fixture
def link() -> Any:
    """The agent of host a."""
    sent: list[bytes] = []
    return SimpleNamespace(**vars(HOST) | {"send": sent.append, "sent": sent})


class Change:
    """Hosts that come to a job whose rank 0 trains on host a, by a clock that the test moves."""

    def __init__(self, launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, self.now = launcher, 1000.0
        self.hosts = [Host("a", 1)]
        self._told: list[tuple[int, Any]] = []
        monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(launcher, "_connect", self._connect)
        monkeypatch.setattr(launcher, "_tell", lambda each, word: self._told.append((each, word)))
        watch = SimpleNamespace(hosts=lambda: self.hosts, complaint=lambda: "")
        vars(launcher).update(_watch=watch, _begun_at=self.now, _started=1)
        launcher._processes = {0: Process(0, ("a", 0), HOST, 1, 0, has_begun=True)}
        launcher._world = [(0, Slot(0, "a", 0, 1, 0, 1))]
        launcher._open_streams(0, 0)

    @staticmethod
    def _connect(name: str, numbers: list[int]) -> Any:
        return SimpleNamespace(**vars(HOST) | {"name": name, "running": set(numbers)})

    def come(self, **slots: int) -> None:
        """Discovery finds these hosts, too, where a process starts for every slot."""
        self.hosts += [Host(name, count) for name, count in slots.items()]
        self.step()

    def ask(self, *numbers: int, join: Join = NEW) -> None:
        """These processes ask for the next world."""
        for number in numbers:
            self.launcher._on_word(self.launcher._processes[number], join)
        self.step()

    def end(self, number: int, status: int = 3) -> None:
        process = self.launcher._processes[number]
        self.launcher._rank_exited(process.host, number, status)
        self.step()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    def step(self) -> None:
        self.launcher._step(self.now, self.now)

    def news(self) -> list[int]:
        """What rank 0 has been told of, except for what it has been told again."""
        words = [word.change for each, word in self._told if isinstance(word, News)]
        self._told.clear()
        return list(dict.fromkeys(words))

    def world(self) -> list[int]:
        return [number for number, _ in self.launcher._world]


@pytest.fixture
def change(launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch) -> Change:
    return Change(launcher, monkeypatch)


ADDED, REMOVED = int(HostUpdateResult.added), int(HostUpdateResult.removed)
TRAINED = Join(sync=True, state=True, commits=7)


def test_processes_that_were_started_together_are_announced_together(change: Change) -> None:
    """Each world costs a sync(), a reset callback and one of --reset-limit."""
    change.come(b=2, c=1)
    change.wait(7.0)
    for number in (3, 1):
        change.ask(number)
        assert change.news() == []
        change.wait(1.5)
    change.ask(2)
    assert change.news() == [ADDED]
    change.ask(0, join=TRAINED)
    assert change.world() == [0, 1, 2, 3]


@pytest.mark.parametrize(("loads", "bound"), [(7.0, 7.0), (0.5, 2.0)])
def test_a_process_that_does_not_get_ready_is_waited_for_as_long_as_the_first_one_took(
    change: Change, loads: float, bound: float
) -> None:
    change.come(b=3)
    change.wait(loads)
    change.ask(2)
    change.wait(bound / 2)
    change.ask(3)
    change.wait(bound / 2 - 0.125)
    assert change.news() == []
    assert change.now + 0.125 in change.launcher._deadlines()
    # All that came while perseusrun was stopped is read before somebody counts as too late.
    change.now += 60.0
    change.launcher._step(change.now, change.now - 60.0)
    assert change.news() == []
    change.wait(0.125)
    assert change.news() == [ADDED]
    assert change.now - 60.0 not in change.launcher._deadlines()
    change.ask(0, join=TRAINED)
    assert change.world() == [0, 2, 3]
    change.launcher._on_word(change.launcher._processes[0], Begun(2))
    change.ask(1)
    assert change.news() == [ADDED]


def test_two_that_are_late_do_not_wait_for_each_other(change: Change) -> None:
    """The others of their start have joined without them."""
    change.come(b=3)
    change.wait(4.0)
    change.ask(1)
    change.wait(4.0)
    change.ask(0, join=TRAINED)
    assert change.world() == [0, 1] and change.news() == [ADDED]
    change.wait(8.0)
    change.ask(2)
    assert change.news() == [ADDED]


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_ends_while_it_loads_is_not_waited_for(change: Change, status: int) -> None:
    change.come(b=2)
    change.wait(7.0)
    change.ask(1)
    assert change.news() == []
    change.end(2, status)
    assert change.news() == [ADDED]


def test_a_process_that_has_lost_its_slot_is_not_waited_for(change: Change) -> None:
    """Even if its host has not answered yet."""
    change.come(b=1, c=1)
    change.launcher._processes[2].host.given_job = False
    change.wait(7.0)
    change.ask(1)
    assert change.news() == []
    change.hosts.pop()
    change.step()
    assert change.news() == [ADDED]


def test_nobody_waits_for_processes_of_a_later_start(change: Change) -> None:
    change.come(b=1)
    change.wait(7.0)
    change.come(c=2)
    change.ask(1)
    assert change.news() == [ADDED]
    change.wait(3.0)
    change.news()
    change.ask(2)  # the news have been told: they are not taken back
    assert change.news() == [ADDED]


def test_nobody_waits_longer_because_others_are_ready_that_came_later(change: Change) -> None:
    change.come(b=2)
    change.wait(1.0)
    change.come(c=2)
    change.wait(3.0)
    change.ask(1)
    change.wait(3.0)
    change.ask(3)
    change.ask(2)  # with which b is complete, but c is not
    change.wait(0.875)
    assert change.news() == []
    change.wait(0.125)
    assert change.news() == [ADDED]


def test_a_world_that_ends_anyway_is_followed_by_one_of_those_that_are_ready(
    change: Change,
) -> None:
    change.come(b=2)
    change.wait(7.0)
    change.ask(1)
    change.ask(0, join=TRAINED)
    assert change.world() == [0, 1]


def test_a_rank_that_is_to_leave_is_told_so_at_once(change: Change) -> None:
    change.come(b=2)
    change.wait(7.0)
    change.ask(1)
    change.hosts.pop(0)
    change.step()
    assert change.news() == [REMOVED | ADDED]


def test_ranks_that_need_new_ones_wait_for_all_that_were_started_together(change: Change) -> None:
    """They are too few without them, and wait in any case. No --elastic-timeout ends that."""
    launcher = change.launcher
    launcher._elasticity = replace(launcher._elasticity, least=2, timeout=1.0)
    change.come(b=3)
    change.wait(7.0)
    change.ask(0, join=TRAINED)
    change.ask(1)
    assert change.world() == [0]
    change.wait(3.0)
    change.ask(3)
    change.wait(3.875)
    assert change.world() == [0] and change.now + 0.125 in launcher._deadlines()
    change.wait(0.125)
    assert change.world() == [0, 1, 3] and not launcher._ending


def test_the_only_rank_with_the_state_waits_for_all_of_a_host_that_takes_its_place(
    change: Change,
) -> None:
    change.come(b=2)
    change.hosts.pop(0)
    change.wait(7.0)
    change.ask(0, join=TRAINED)
    change.ask(2)
    assert change.world() == [0]
    change.ask(1)
    assert change.world() == [0, 1, 2]


def test_new_ranks_cannot_join_ranks_that_have_begun_a_second_loop(
    launcher: driver.ElasticLauncher, link: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """They would begin with the first one. Neither do others start in their place."""
    vars(launcher)["_watch"] = SimpleNamespace(hosts=lambda: [Host("a", 3)], complaint=lambda: "")
    launcher._processes = {
        0: Process(0, ("a", 0), HOST, 1, 0, has_begun=True),
        1: Process(1, ("a", 1), HOST, 1, 1, has_begun=True),
        2: Process(2, ("a", 2), link, request=NEW),
    }
    for loop in (1, 2, 3):
        for number in (0, 1):
            launcher._on_word(launcher._processes[number], Loop(loop))
        if loop == 2:
            launcher._step(time.monotonic(), time.monotonic())
    (told,) = _sent_to(link)
    assert told[:2] == [b"TELL", b"2"]
    assert b'"leave"' in told[2] and b"Use one for the whole script" in told[2]
    assert capfd.readouterr().err.count("no new rank can join the job any more") == 1
    del launcher._processes[2]
    launcher._step(time.monotonic(), time.monotonic())
    assert sorted(launcher._processes) == [0, 1]
    assert not any(launcher._news)


def test_ranks_in_a_second_loop_wait_for_slots_that_may_come_back(
    launcher: driver.ElasticLauncher, link: Any
) -> None:
    """Discovery has left out one of two hosts for a moment."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 2, 2)
    hosts = [Host("a", 1)]
    vars(launcher)["_watch"] = SimpleNamespace(hosts=lambda: hosts, complaint=lambda: "")
    launcher._latest_loop = 2
    launcher._processes = {
        number: Process(number, (name, 0), link, 1, number, loop=2, request=Join(False, True, 5))
        for number, name in enumerate("ab")
    }
    for number in launcher._processes:
        launcher._open_streams(number, number)
    launcher._step(time.monotonic(), time.monotonic())
    assert not launcher._ending
    hosts.append(Host("b", 1))
    launcher._step(time.monotonic(), time.monotonic())
    assert [number for number, _ in launcher._world] == [0, 1]


@pytest.mark.parametrize("least", [1, 2])
def test_rank_that_goes_back_to_an_earlier_loop_than_others_leaves_or_ends_the_job(
    launcher: driver.ElasticLauncher, link: Any, least: int
) -> None:
    """The other one has finished the first loop when a third rank died."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 3, least, cooldown=(1.0, 1.0))
    vars(launcher)["_watch"] = SimpleNamespace(hosts=lambda: [Host("a", 3)], complaint=lambda: "")
    launcher._processes = {
        number: Process(number, ("a", number), link, 1, number, loop=loop)
        for number, loop in ((0, 1), (2, 2))
    }
    launcher._latest_loop = 2
    for number, each in launcher._processes.items():
        launcher._open_streams(number, number)
        each.request = Join(True, True, 9 - number)
    launcher._step(time.monotonic(), time.monotonic())
    if least == 2:
        assert launcher._ending
        assert "1 ranks are left, instead of 2" in str(launcher._error)
        return
    assert [number for number, _ in launcher._world] == [2]
    found = {each[1]: each[2] for each in _sent_to(link)}
    assert (
        b'"leave"' in found[b"0"] and b"the others have begun elastic.run number 2" in found[b"0"]
    )
    assert b'"place"' in found[b"2"]


@pytest.mark.parametrize(
    ("most", "worlds"),
    [
        (None, [[1, 2, 3], [2, 3]]),
        (2, [[1, 2], [2, 3]]),  # a new rank makes room, and waits for the next world
        (1, [[1, 2], [2]]),  # somebody must take the state
    ],
)
def test_a_leaving_rank_stays_for_a_world_if_nobody_else_has_the_state(
    launcher: driver.ElasticLauncher, most: int | None, worlds: list[list[int]]
) -> None:
    """Discovery has replaced host a, of ranks 0 and 1, by host b. Rank 1 has more commits."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 1, 1, most)
    hosts = [Host("b", 2)]
    vars(launcher)["_watch"] = SimpleNamespace(hosts=lambda: hosts, complaint=lambda: "")
    sent: list[bytes] = []
    link: Any = SimpleNamespace(**vars(HOST) | {"send": sent.append})
    processes = launcher._processes = {
        0: Process(0, ("a", 0), link, 1, 0, request=Join(False, True, 5)),
        1: Process(1, ("a", 1), link, 1, 1, request=Join(False, True, 6)),
        2: Process(2, ("b", 0), link, request=NEW),
    }
    if most != 1:
        processes[3] = Process(3, ("b", 1), link, request=NEW)
    for number in processes:
        launcher._open_streams(number, number)
    found: list[list[int]] = []
    for _ in worlds:
        for number, each in processes.items():
            if found and number in found[-1]:
                each.request = Join(False, True, 7)  # it has got the state in this world
        launcher._step(time.monotonic(), time.monotonic())
        found.append([number for number, _ in launcher._world])
        assert not launcher._ending
    assert found == worlds
    assert [number for number, each in processes.items() if each.dismissed] == [0, 1]
    leaving = [line.split()[1] for line in sent if b"leave" in line]
    assert leaving == [b"0", b"1"]
    news = {line.split()[1] for line in sent if b"news" in line}
    assert {b"1", b"2"} <= news  # so the first commit of the first world ends it


def test_a_new_rank_is_not_left_out_of_a_world_with_room_for_the_state(
    launcher: driver.ElasticLauncher,
) -> None:
    """Nor does a rank stay that leaves while another one with the state does not."""
    launcher._slots.discover([Host("b", 1), Host("c", 1)])
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 1, 1, 2)
    launcher._processes = {
        0: Process(0, ("a", 0), HOST, 1, 0, request=Join(False, True, 6)),
        1: Process(1, ("b", 0), HOST, 1, 1, request=Join(False, True, 5)),
        2: Process(2, ("c", 0), HOST, request=NEW),
    }
    for number in range(3):
        launcher._open_streams(number, number)
    launcher._begin_world()
    assert [number for number, _ in launcher._world] == [1, 2]
    assert launcher._processes[0].dismissed


def test_ranks_that_train_keep_their_slots_when_others_load_on_a_host_that_was_seen_first(
    launcher: driver.ElasticLauncher,
) -> None:
    """Host y was gone for a while, host x came, and at last both are there."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 1, 1, 3)
    for hosts in ([Host("y", 2)], [Host("x", 2), Host("y", 2)]):
        launcher._slots.discover(hosts)
    launcher._processes = {
        0: Process(0, ("y", 0), HOST),
        1: Process(1, ("y", 1), HOST, request=NEW),
        2: Process(2, ("x", 0), HOST, 1, 0),
        3: Process(3, ("x", 1), HOST, 1, 1),
    }
    assert launcher._wanted(time.monotonic()) == [("x", 0), ("x", 1), ("y", 0)]


@pytest.mark.parametrize("hello", [None, "hello"])
def test_hosts_without_a_job_end_silently_after_the_first_success(
    launcher: driver.ElasticLauncher, hello: str | None
) -> None:
    killed: list[bool] = []
    fields = {
        "hello": hello,
        "given_job": False,
        "lost": False,
        "kill": lambda: killed.append(True),
    }
    link: Any = SimpleNamespace(**vars(HOST) | fields)
    launcher._hosts = [link]
    launcher._processes = {3: Process(3, ("a", 3), link)}
    launcher._succeeded = [(0, 0.0)]
    launcher._step(time.monotonic(), time.monotonic())
    launcher._hosts = []
    assert link.lost
    assert killed == [True]


def test_names_of_hosts_are_not_looked_up_while_ranks_wait_for_the_launcher(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> bool:
        raise AssertionError(f"{name} is looked up")

    monkeypatch.setattr(launch, "is_local", fail)
    vars(launcher)["_watch"] = SimpleNamespace(is_local=lambda name: name == "a")
    started: list[bool] = []

    def start(name: str, numbers: list[int], local: bool, *_: object) -> None:
        started.append(local)
        raise OSError("enough")

    monkeypatch.setattr(launch, "HostLink", start)
    for name in ("a", "b"):
        with pytest.raises(LaunchError):
            launcher._connect(name, [1])
    assert started == [True, False]


def test_limit_of_the_first_world_is_that_of_what_it_waits_for(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes have the start timeout to load; slots have the elastic timeout to appear."""
    launcher._elasticity = Elasticity(HostDiscoveryFunction(dict), 2, 1, timeout=600.0)
    launcher._job = Job(["true"], [], start_timeout=60)
    launcher._epoch, said = -1, []
    monkeypatch.setattr(launcher, "_give_up", said.append)
    launcher._processes = {0: Process(0, ("a", 0), HOST, request=NEW)}

    def wait(until: float) -> None:
        launcher._check_patience(until, until)

    launcher._slots.discover([Host("a", 2)])
    wait(0.0)
    launcher._slots.discover([Host("a", 1)])
    wait(20.0)
    wait(619.0)
    assert said == []
    launcher._slots.discover([Host("a", 2)])
    wait(619.5)
    wait(679.0)
    assert said == []
    wait(680.0)
    assert said == [
        "1 ranks asked to join and 2 slots can be used after 60 s (--start-timeout), instead of 2"
    ]
    said.clear()
    launcher._slots.discover([Host("a", 1)])
    wait(680.0)
    wait(1280.0)
    assert "1 slots can be used after 600 s (--elastic-timeout), instead of 2" in said[0]


def test_discovery_that_fails_differently_each_time_is_not_reported_each_time(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    now = 1000.0
    monkeypatch.setattr(launcher, "_print", printed.append)
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now))
    for second in range(62):
        launcher._complain(f"failed after {second} ms" if second < 61 else "")
        now += 1.0
    assert printed == [
        *(f"warning: failed after {each} ms; the hosts stay as they are" for each in (0, 30, 60)),
        "the discovery of hosts works again",
    ]


def test_host_on_which_no_agent_starts_leaves_no_output_open(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise LaunchError("no descriptors")

    monkeypatch.setattr(launcher, "_connect", fail)
    monkeypatch.setattr(launcher, "_print", lambda _: None)
    launcher._start_at("a", [("a", 1), ("a", 2)], Cohort(0.0))
    assert launcher._streams == {}
    assert launcher._slots.usable(time.monotonic()) == [("a", 0)]


# ---- slots that fail and return, while too few ranks are there for a world ----


class Start(Change):
    """A job that starts with two ranks, on hosts whose failed slots rest for 1 s."""

    def __init__(
        self, launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch, *, slots: int = 2
    ) -> None:
        super().__init__(launcher, monkeypatch)
        launcher._elasticity = replace(launcher._elasticity, start=2, least=2, timeout=8.0)
        launcher._job = replace(launcher._job, start_timeout=5)
        launcher._epoch, launcher._state_exists, launcher._started = -1, False, 0
        launcher._processes, launcher._world = {}, []
        self.hosts = [Host("a", slots)]
        self.step()

    def fail_at(self, *indices: int, after: float, until: float) -> None:
        """Whatever starts in these slots fails so soon. until: a time, if the job does not end."""
        born: dict[int, float] = {}
        while self.now < until and not self.launcher._ending:
            for number, each in list(self.launcher._processes.items()):
                age = self.now - born.setdefault(number, self.now)
                if each.place[1] in indices and age >= after:
                    self.end(number)
            self.wait(0.25)


@pytest.mark.parametrize("after", [0.0, 0.25, 0.75, 2.5])
@pytest.mark.parametrize("asks", [False, True])
def test_slots_that_fail_and_return_for_ever_end_the_job_before_its_first_world(
    launcher: driver.ElasticLauncher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    asks: bool,
    after: float,
) -> None:
    """asks: whether the rank in the other slot waits for a world; else it fails as well."""
    start = Start(launcher, monkeypatch)
    if asks:
        start.ask(0)
    start.fail_at(*([1] if asks else [0, 1]), after=after, until=1100.0)
    assert launcher._ending and launcher.first_failure == (int(asks), 3)
    # At that time, or when those fail again that have started before it.
    assert after + 8.0 <= start.now - 1000.0 <= after + 8.25 + after
    waiting = "1 ranks asked to join and 1" if asks else "0 ranks asked to join and 0"
    limit = "8 s after the first failure (--elastic-timeout), instead of 2"
    assert f"the job ends: {waiting} slots can be used {limit}" in capfd.readouterr().err


def test_slots_that_never_fail_all_at_once_end_the_job_before_its_first_world(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are always as many as it needs, and nobody asks."""
    start = Start(launcher, monkeypatch, slots=4)
    for second in range(100):
        if launcher._ending:
            break
        assert len(launcher._wanted(start.now)) == 4
        for number in sorted(launcher._processes)[: 2 if second % 2 else 1]:
            start.end(number)
        start.wait(1.0)
    assert 1008.0 <= start.now <= 1012.0


def test_ranks_that_start_slowly_after_a_failure_are_not_given_up(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(launcher, monkeypatch)
    start.end(1)
    start.wait(1.0)
    start.wait(60.0)
    start.ask(2)
    assert start.world() == [] and not launcher._ending
    start.wait(4.75)
    start.ask(0)
    assert sorted(start.world()) == [0, 2]
    # The next wait has a limit of its own, even if nothing was to do meanwhile.
    vars(launcher)["_server"] = SimpleNamespace(abandon=lambda *_: None, close=lambda: None)
    launcher._rank_exited(launcher._processes[2].host, 2, 3)
    start.ask(0)
    start.wait(7.75)
    assert not launcher._ending
    start.wait(0.25)
    assert launcher._ending


def test_a_host_that_comes_long_after_the_first_failure_is_not_given_up(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(launcher, monkeypatch)
    start.end(1)
    start.wait(1.0)
    start.wait(20.0)
    start.come(b=1)
    start.end(2)
    start.wait(20.0)
    assert not launcher._ending
    start.ask(3)
    start.ask(0)
    assert start.world() == []  # as another one loads
    start.end(4)
    assert sorted(start.world()) == [0, 3] and not launcher._ending


def test_an_extra_slot_that_fails_for_ever_does_not_end_a_job_that_has_enough(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(launcher, monkeypatch, slots=3)
    start.fail_at(2, after=0.5, until=1060.0)
    start.ask(0)
    start.fail_at(2, after=0.5, until=1062.0)
    assert start.world() == [] and not launcher._ending
    start.ask(1)
    start.fail_at(2, after=0.5, until=1064.0)
    assert start.world() == [0, 1] and not launcher._ending


def test_a_rank_that_asks_in_a_slot_that_has_failed_is_not_given_up(
    launcher: driver.ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has been started when no more slots would be tried."""
    start = Start(launcher, monkeypatch, slots=3)
    start.fail_at(2, after=0.5, until=1020.0)
    newest = max(launcher._processes)
    start.ask(newest)
    start.end(1)
    assert not launcher._ending
    start.ask(0)
    assert sorted(start.world()) == [0, newest]


def test_a_survivor_does_not_wait_for_ever_for_ranks_that_ask_and_die(
    change: Change, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two start together on a host, which dies each time while one waits for the other."""
    launcher = change.launcher
    launcher._elasticity = replace(launcher._elasticity, least=2, timeout=8.0)
    change.come(b=2)
    change.ask(0, join=TRAINED)
    while change.now < 1100.0 and not launcher._ending:
        if new := sorted(launcher._processes)[1:]:
            change.ask(new[0])
            change.wait(1.0)
            for number in new:
                launcher._rank_exited(launcher._processes[number].host, number, 3)
        change.wait(0.25)
    assert change.world() == [0] and 1009.0 <= change.now <= 1010.5
    assert "8 s after the first failure (--elastic-timeout)" in capfd.readouterr().err


def test_failures_while_a_rank_trains_do_not_shorten_a_later_wait(change: Change) -> None:
    launcher = change.launcher
    launcher._elasticity = replace(launcher._elasticity, least=2, timeout=8.0)
    change.come(b=2)
    change.end(1)
    change.wait(7.0)
    change.ask(0, join=TRAINED)
    change.end(2)
    change.wait(7.75)
    assert not launcher._ending
    change.wait(0.25)
    assert launcher._ending
