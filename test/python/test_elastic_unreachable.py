"""Which hosts an elastic job gives up that do not answer while ranks wait for the next world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from perseus.run.bootstrap.words import Join
from perseus.run.elastic import driver
from perseus.run.elastic.discovery import HostDiscoveryFunction
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.elastic.late import Questions
from perseus.run.elastic.process import Process
from perseus.run.job import Job

NOW = 100.0


class Rank(NamedTuple):
    """A process on a host. wish: what it asks for the next world; None = it has not asked."""

    host: str
    wish: Join | None = None
    epoch: int = 3


ASKS = Join(sync=False, state=True, commits=7)
NEW = Join(sync=True, state=False, commits=0)


def given_up(
    ranks: list[Rank],
    silent: dict[str, float],
    least: int,
    cooldown: tuple[float, float] | None = (1.0, 2.0),
    asked_for: float = 10.0,
) -> list[str]:
    """The hosts that are. silent: for how many seconds each has been; all others are not."""
    discovery = HostDiscoveryFunction(dict)
    launcher = driver.ElasticLauncher(
        Job(command=["true"], slots=[]), Elasticity(discovery, 1, least, cooldown=cooldown)
    )
    links = {
        name: SimpleNamespace(name=name, alive_at=NOW - silent.get(name, 0.0), send=lambda _: None)
        for name in dict.fromkeys(rank.host for rank in ranks)
    }
    lost: list[str] = []
    processes = {}
    for number, (host, wish, epoch) in enumerate(ranks):
        process = Process(number, (host, number), links[host], epoch, number, wish)  # type: ignore[arg-type]
        process.had_state = epoch >= 0
        processes[number] = process
    vars(launcher).update(
        _processes=processes,
        _epoch=3,
        _state_exists=True,
        _wanted=lambda _: [process.place for process in processes.values()],
        _monitored_hosts=lambda: list(links.values()),
        _on_lost_hosts=lambda hosts, _: lost.extend(host.name for host in hosts),
    )
    launcher._questions.since = NOW - asked_for
    late = [process for process in processes.values() if process.request is None]
    launcher._give_up_unreachable(late, NOW)
    return lost


def test_a_host_is_given_up_that_has_not_answered_for_three_quarters_of_a_second() -> None:
    ranks = [Rank("a", ASKS), Rank("b", ASKS), Rank("c")]
    assert given_up(ranks, {"c": 0.8}, 2) == ["c"]
    assert given_up(ranks, {"c": 0.7}, 2) == []
    assert given_up(ranks, {"c": 60.0}, 2, asked_for=0.7) == []  # since it has been asked


def test_a_host_can_answer_while_a_rank_of_it_takes_long_to_die() -> None:
    sent: list[bytes] = []
    shown: list[str] = []
    host = SimpleNamespace(name="c", send=sent.append)
    process = Process(5, ("c", 0), host, 3, 2)  # type: ignore[arg-type]
    questions = Questions(lambda *_: None, shown.append)
    for turn, expected in enumerate([b"STATE 5\n", b"KILL 5\n", b"STATE 5\n", b"STATE 5\n"]):
        now = NOW + 0.25 * turn
        assert questions.are_due([process], now)
        questions.ask([process], True, now)
        process.is_stopped = True  # as the answer says
        assert sent.pop() == expected and not sent
    assert len(shown) == 1 and "is stopped (SIGSTOP) while others wait" in shown[0]


def test_perseusrun_that_was_stopped_itself_asks_anew() -> None:
    host = SimpleNamespace(name="c", send=lambda _: None)
    process = Process(5, ("c", 0), host, 3, 2)  # type: ignore[arg-type]
    questions = Questions(lambda *_: None, lambda _: None)
    for now in (NOW, NOW + 0.25, NOW + 0.5, NOW + 1.1):
        assert questions.are_due([process], now)
    assert questions.since == NOW + 1.1


def test_where_it_would_not_come_back_it_has_longer() -> None:
    ranks = [Rank("a", ASKS), Rank("b", ASKS), Rank("c")]
    assert given_up(ranks, {"c": 7.9}, 2, cooldown=None) == []
    assert given_up(ranks, {"c": 8.1}, 2, cooldown=None) == ["c"]


def test_a_silent_host_for_which_nobody_waits_is_left_alone() -> None:
    assert given_up([Rank("a", ASKS), Rank("b", ASKS), Rank("c")], {"b": 5.0}, 1) == []


@pytest.mark.parametrize(("least", "expected"), [(2, ["b"]), (3, [])])
def test_ranks_of_the_host_itself_do_not_count(least: int, expected: list[str]) -> None:
    ranks = [Rank("a", ASKS), Rank("a", ASKS), Rank("b", ASKS), Rank("b")]
    assert given_up(ranks, {"b": 5.0}, least) == expected


def test_a_host_is_kept_that_alone_has_the_state() -> None:
    ranks = [Rank("a", NEW, epoch=-1), Rank("a", NEW, epoch=-1), Rank("b", ASKS), Rank("b")]
    assert given_up(ranks, {"b": 5.0}, 2) == []


@pytest.mark.parametrize(("least", "expected"), [(2, ["c"]), (3, [])])
def test_while_a_world_begins_its_other_ranks_count(least: int, expected: list[str]) -> None:
    assert given_up([Rank("a"), Rank("b"), Rank("c")], {"c": 5.0}, least) == expected
