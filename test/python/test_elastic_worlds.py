"""Which worlds an elastic job begins, and what becomes of processes that are in none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.run import launch
from perseus.run.bootstrap.words import Join
from perseus.run.elastic import driver
from perseus.run.elastic.discovery import HostDiscoveryFunction
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.elastic.process import Process
from perseus.run.hosts import Host
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
