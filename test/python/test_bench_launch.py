"""How perseus-bench starts its ranks: where they run, and with how many threads."""

from __future__ import annotations

import os
import sys

import pytest

from perseus import basics
from perseus.bench import __main__ as command_line
from perseus.bench import launch, worker
from perseus.bench.launch import Job
from perseus.bench.plan import Plan


def test_ranks_of_this_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for hosts in (1, 2):
        assert launch._environment(Job(Plan([]), 4, hosts))["OMP_NUM_THREADS"] == "3"
    assert launch._environment(Job(Plan([]), 24))["OMP_NUM_THREADS"] == "1"


def test_perseusrun_divides_the_cores_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    variables = launch._environment(Job(Plan([]), 4, placement="a:2,b:2"))
    assert not {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"} & variables.keys()


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "3", "TF_NUM_INTRAOP_THREADS": "5"}, "5"),
        ({}, None),
    ],
)
def test_tensorflow_has_as_many_threads_as_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: str | None
) -> None:
    class StartedError(Exception):
        pass

    def init() -> None:
        raise StartedError

    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(basics, "init", init)
    monkeypatch.setattr(sys, "argv", ["worker", Plan([]).to_json()])
    with pytest.raises(StartedError):
        worker.main()
    assert os.environ.get("TF_NUM_INTRAOP_THREADS") == threads


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["-H", "a:4,b:3"], 7),
        (["-H", "a,b:1"], 2),
        (["-H", "a:4,b:3", "-np", "5"], 5),
        ([], 2),
        (["--hosts", "3"], 3),
    ],
)
def test_every_slot_that_is_named_has_a_rank(arguments: list[str], ranks: int) -> None:
    (job,) = command_line._jobs(command_line._parser().parse_args(["latency", *arguments]))
    assert job.ranks == ranks


@pytest.mark.parametrize(
    ("ranks", "hosts", "placement"),
    [
        (2, 2, "host0:1,host1:1"),
        (5, 2, "host0:3,host1:2"),
        (5, 4, "host0:2,host1:1,host2:1,host3:1"),
    ],
)
def test_every_virtual_host_has_its_part_of_the_ranks(
    ranks: int, hosts: int, placement: str
) -> None:
    command, _ = launch._launcher(Job(Plan([]), ranks, hosts), lambda _: None)
    assert command[command.index("-H") + 1] == placement
