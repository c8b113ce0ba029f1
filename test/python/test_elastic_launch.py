"""The launcher's side of elastic jobs: flags, lost starts, news, addresses."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from perseusrun_command import environment, perseusrun

from perseus import _core, errors
from perseus.elastic import HostUpdateResult
from perseus.run import cli, signals
from perseus.run.bootstrap.addresses import is_own_address, source_address
from perseus.run.elastic import driver
from perseus.run.elastic.discovery import FixedHosts, HostDiscoveryFunction
from perseus.run.elastic.driver import Elasticity
from perseus.run.elastic.feeds import Feeds
from perseus.run.elastic.flags import checked_elasticity
from perseus.run.elastic.late import Questions
from perseus.run.elastic.process import Process
from perseus.run.hosts import Host, Slot
from perseus.run.job import Job
from perseus.run.launch import Launcher
from perseus.run.link import is_local, real_name

# ---- flags ----


def _elasticity(
    start: int | None = None, least: int | None = None, most: int | None = None, **options: Any
) -> Elasticity:
    given = {"timeout": None, "reset_limit": None, "cooldown": None, **options}
    return checked_elasticity(FixedHosts([Host("a", 8)]), start, least, most, **given)


def test_fewest_ranks_and_first_ranks_are_each_others_defaults() -> None:
    for made in (_elasticity(start=3), _elasticity(least=3)):
        assert (made.start, made.least, made.most) == (3, 3, None)
    made = _elasticity(4, 2, 6, reset_limit=0, cooldown=[1, 3600])
    assert (made.start, made.least, made.most, made.reset_limit) == (4, 2, 6, 0)
    assert made.cooldown == (1.0, 3600.0)
    assert made.discovery.find() == [Host("a", 8)]


def test_timeout_is_the_flags_or_the_variables_or_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC_TIMEOUT", raising=False)
    assert _elasticity(1).timeout == 600.0
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "40")
    assert _elasticity(1).timeout == 40.0
    assert _elasticity(1, timeout=30).timeout == 30.0
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "soon")
    assert _elasticity(1, timeout=30).timeout == 30.0
    with pytest.raises(ValueError, match="HOROVOD_ELASTIC_TIMEOUT='soon': expected a whole number"):
        _elasticity(1)


def test_limits_may_be_equal() -> None:
    made = _elasticity(2, 2, 2, timeout=1, reset_limit=0, cooldown=(5, 5))
    assert (made.least, made.most, made.timeout, made.cooldown) == (2, 2, 1.0, (5.0, 5.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "-np or --min-np is missing: give the number of ranks"),
        ({"start": 2, "least": 3}, "--min-np 3, -np 2: expected 1 <= min <= np <= max"),
        ({"start": 2, "most": 1}, "--min-np 2, -np 2, --max-np 1: expected 1 <= min <= np <= max"),
        ({"least": 0}, "--min-np 0, -np 0: expected 1 <= min"),
        ({"start": 2, "least": 0}, "--min-np 0, -np 2: expected 1 <= min"),
        ({"start": 1, "most": 0}, "--max-np 0: expected"),
        ({"start": 1, "reset_limit": -1}, "--reset-limit -1: expected 0 or more"),
        (
            {"start": 1, "cooldown": [0, 5]},
            r"-cooldown-range .*\[0, 5\]: expected two",
        ),
        (
            {"start": 1, "cooldown": [6, 5]},
            r"range.* \[6, 5\]: .*, the shorter one first",
        ),
        ({"start": 1, "cooldown": [5]}, "expected two numbers of seconds"),
        ({"start": 1, "cooldown": 5}, "expected two numbers of seconds"),
        ({"start": 1, "cooldown": ["x", "y"]}, "expected two numbers of seconds"),
        (
            {"start": 1, "cooldown": [1, 3601]},
            r"-cooldown-range .*\[1, 3601\]: expected",
        ),
        ({"start": 1, "timeout": 0}, "--elastic-timeout 0: expected 1 or more seconds"),
    ],
)
def test_limits_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _elasticity(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-np", "3", "-np", "2"], "--min-np 3, -np 2"),
        (["--host-discovery-script", "/nowhere"], "-np or --min-np is missing"),
        (["--min-np", "1", "--elastic-timeout", "0"], "--elastic-timeout 0: expected 1 or more"),
        (
            ["--min-np", "1", "--blacklist-cooldown-range", "5", "4"],
            "[5, 4]: expected",
        ),
        (["--min-np", "2", "--mpi"], "--mpi cannot start elastic jobs: mpirun's ranks are fixed"),
        (["--min-np", "2", "-npernode", "2"], "-npernode does not go with elastic jobs"),
        (["--min-np", "1", "-H", "a:b"], "Invalid host input in -H a:b"),
        (
            ["--min-np", "2", "-np", "4", "-H", "a:2"],
            "Requested more processes (4) than slots available (2) on a:2",
        ),
        (["--min-np", "1", "-H", "a", "--host-discovery-script", "f"], "not allowed with argument"),
    ],
)
def test_elastic_mistake_on_the_command_line_is_one_line(
    arguments: list[str], message: str
) -> None:
    result = perseusrun(*arguments, "echo", "started", timeout=60)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("perseusrun: error: ") and message in result.stderr


def test_bad_timeout_variable_is_one_line_that_names_it() -> None:
    for value in ("soon", "0"):
        env = environment(HOROVOD_ELASTIC_TIMEOUT=value)
        result = perseusrun("--min-np", "1", "true", env=env, timeout=60)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
        assert f"HOROVOD_ELASTIC_TIMEOUT='{value}'" in result.stderr


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Elasticity]:
    """What perseusrun would do with arguments, without starting anything."""
    found: list[Elasticity] = []

    class Recorder:
        def __init__(self, job: Job, elasticity: Elasticity) -> None:
            assert (job.command, job.slots) == (["train"], [])
            found.append(elasticity)

        def run(self) -> int:
            return 0

    def ask(*arguments: str) -> Elasticity:
        assert cli.main([*arguments, "train"]) == 0
        return found.pop()

    monkeypatch.delenv("HOROVOD_ELASTIC_TIMEOUT", raising=False)
    monkeypatch.setattr(cli, "ElasticLauncher", Recorder)
    return ask


@pytest.mark.parametrize("suffix", ["np", "num-proc"])
def test_short_and_long_spellings_of_the_limits_work(
    asked_for: Callable[..., Elasticity], suffix: str
) -> None:
    made = asked_for(f"--min-{suffix}", "2", "-np", "3", f"--max-{suffix}", "5")
    assert (made.least, made.start, made.most) == (2, 3, 5)
    assert (made.timeout, made.reset_limit, made.cooldown) == (600.0, None, None)
    assert made.discovery.find() == [Host("localhost", 5)]


def test_other_elastic_flags_reach_the_job(asked_for: Callable[..., Elasticity]) -> None:
    flags = ["--elastic-timeout", "7", "--reset-limit", "3", "--blacklist-cooldown-range", "5", "9"]
    made = asked_for("--min-np", "2", *flags, "-H", "a:2,b:3")
    assert (made.timeout, made.reset_limit, made.cooldown) == (7.0, 3, (5.0, 9.0))
    assert made.discovery.find() == [Host("a", 2), Host("b", 3)]
    assert not made.discovery.may_change


def test_discovery_script_makes_a_job_elastic(
    asked_for: Callable[..., Elasticity], tmp_path: Path
) -> None:
    script = tmp_path / "find"
    script.write_text("#!/bin/sh\necho a; echo b:1\n")
    script.chmod(0o755)
    made = asked_for("-np", "2", "--host-discovery-script", str(script), "--slots-per-host", "4")
    assert (made.least, made.start, made.most) == (2, 2, None)
    assert made.discovery.may_change
    assert made.discovery.find() == [Host("a", 4), Host("b", 1)]


# ---- a start that lacks a rank ----

_SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[_core.StoreServer]:
    made = _core.StoreServer("127.0.0.1", 0, False, _SECRET)
    yield made
    made.close()


def _start(server: _core.StoreServer, rank: int, size: int, job: str, epoch: int) -> _core.Context:
    return _core.Context(
        rank=rank, size=size, store_host="127.0.0.1", store_port=server.port, secret=_SECRET,
        job=job, epoch=epoch, overrides=["HOROVOD_START_TIMEOUT=60"],
    )  # fmt: skip


def test_abandoned_start_ends_at_once_with_the_reason(server: _core.StoreServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(_start, server, rank, 3, "job", 7) for rank in (0, 2)]
        time.sleep(0.1)
        assert not any(start.done() for start in starts)
        server.abandon("job", 7, 1, "rank 1 on b failed with exit code 9")
        for start in starts:
            reason = r"rank 1 .*\(world 7\): rank 1 on b failed with exit code 9"
            with pytest.raises(errors.AbortedError, match=reason):
                start.result(timeout=20)


def test_start_that_was_abandoned_before_does_not_wait(server: _core.StoreServer) -> None:
    server.abandon("job", 7, 0, "gone")
    with pytest.raises(errors.AbortedError, match=r"rank 0 .*: gone"):
        _start(server, 1, 2, "job", 7)


def test_starts_of_other_epochs_and_jobs_go_on(server: _core.StoreServer) -> None:
    worlds = [("job", 6), ("job", 8), ("other", 7)]
    with ThreadPoolExecutor(8) as pool:
        lost = pool.submit(_start, server, 0, 2, "job", 7)
        firsts = [pool.submit(_start, server, 0, 2, *world) for world in worlds]
        server.abandon("job", 7, 1, "gone")
        with pytest.raises(errors.AbortedError):
            lost.result(timeout=20)
        seconds = [pool.submit(_start, server, 1, 2, *world) for world in worlds]
        started: list[Future[_core.Context]] = firsts + seconds
        contexts = [start.result(timeout=30) for start in started]
    assert [context.size for context in contexts] == [2] * 6
    for context in contexts:
        context.close()


# ---- news about hosts ----


def test_news_stay_in_order_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = driver.ElasticLauncher.__new__(driver.ElasticLauncher)
    told: list[float] = []
    member = SimpleNamespace(number=3, place=("a", 0), request=None, epoch=0, has_begun=True)
    launcher._processes, launcher._is_feeding = {}, False
    launcher._feeds = Feeds(lambda *_: None)
    monkeypatch.setattr(launcher, "_members", lambda: [member], raising=False)
    monkeypatch.setattr(launcher, "_wanted", lambda _: [], raising=False)
    monkeypatch.setattr(launcher, "_candidates", list, raising=False)
    monkeypatch.setattr(launcher, "_tell", lambda _, said: told.append(said.at), raising=False)
    days = iter([1e9, 1e9 - 3600])
    monkeypatch.setattr(time, "time", lambda: next(days))
    for _ in range(2):
        launcher._news, launcher._news_at = (frozenset(), frozenset()), 0.0
        launcher._send_news(0.0, 0.0)
    assert 0 < told[0] < told[1]


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("localhost,b", "10.1.2.3"),
        ("localhost,tunnel,b", "10.1.2.3"),
        ("localhost,tunnel", ""),
        ("localhost,lost", ""),
        ("localhost,lost,b", ""),
    ],
)
def test_store_of_fixed_hosts_listens_where_they_see_this_host(
    hosts: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "is_local", lambda name: name == "localhost")
    monkeypatch.setattr(driver, "real_name", lambda name: f"{name}.example")
    sources = {"b.example": "10.1.2.3", "tunnel.example": "127.0.0.1"}
    monkeypatch.setattr(driver, "source_address", sources.get)
    launcher = driver.ElasticLauncher.__new__(driver.ElasticLauncher)
    launcher._job = SimpleNamespace(interfaces=[])
    fixed = FixedHosts([Host(name, 1) for name in hosts.split(",")])
    launcher._elasticity = SimpleNamespace(discovery=fixed)
    assert launcher._store_address() == address


@pytest.mark.parametrize(("seconds", "expected"), [(-1.0, []), (1.0, ["given up"])])
def test_time_in_which_perseusrun_was_stopped_is_not_waited_for(
    seconds: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = driver.ElasticLauncher(
        Job(["true"], []), Elasticity(HostDiscoveryFunction(dict), 1, 1)
    )
    given_up: list[str] = []
    monkeypatch.setattr(launcher, "_fail", lambda _: given_up.append("given up"))
    monkeypatch.setattr(launcher, "_give_up", lambda _: given_up.append("given up"))
    monkeypatch.setattr(
        launcher, "_watch", SimpleNamespace(hosts=lambda: None, complaint=lambda: "")
    )
    deadline = time.monotonic() - 60.0
    before = deadline + seconds

    launcher._discovers_until = deadline
    assert not launcher._has_hosts(before)
    assert given_up == expected

    given_up.clear()
    launcher._give_up_at, launcher._waits_by = deadline, "--elastic-timeout"
    assert not launcher._may_begin(before)
    launcher._check_patience(time.monotonic(), before)
    assert given_up == expected
    launcher._release()


def test_launcher_and_ranks_mean_the_same_change() -> None:
    assert HostUpdateResult.removed == driver._REMOVED
    assert HostUpdateResult.added == driver._ADDED


# ---- ranks for which others wait ----


def test_a_rank_is_not_late_before_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start fails after a minute of questions to one rank; then another is late, too."""
    told: list[int] = []
    host = SimpleNamespace(send=lambda line: told.append(int(line.split()[1])))
    first, second = (
        Process(number, ("a", number), cast(Any, host), heard_at=100.0) for number in (1, 2)
    )
    killed: list[str] = []
    questions = Questions(lambda *_: None, killed.append)
    now = 100.0
    while now < 160.0:
        assert questions.are_due([first], now)
        first.heard_at = now  # it answers
        questions.ask([first], False, now)
        now += 0.25
    for late in ([first, second], [second]):
        assert questions.are_due(late, now)
        questions.ask(late, True, now)
        now += 0.25
    assert not [line for line in killed if "is killed" in line]
    assert not second.is_killed and told[-1] == 2


# ---- addresses ----


def test_addresses_of_this_host_are_its_own() -> None:
    own = source_address("192.0.2.1")  # of the interface with a route, if there is one
    for address in ("localhost", "127.0.0.1", "127.0.0.2", *([own] if own else [])):
        assert is_own_address(address), address
    for other in ("192.0.2.1", "nowhere.invalid", "a..b", "x" * 64):
        assert not is_own_address(other) and not is_local(other), other


def test_capitals_make_a_host_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1.Example.org")
    for name in ("LOCALHOST", "node1.example.ORG", "NODE1"):
        assert is_local(name), name


def test_what_ssh_is_configured_for_may_be_no_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_bytes(b"#!/bin/sh\nprintf 'user m\\374ller\\nhostname a.example\\n'\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert real_name("a") == "a.example"


def test_a_missing_command_whose_name_is_no_utf_8_is_named(tmp_path: Path) -> None:
    done = perseusrun("-np", "1", os.fsdecode(b"./caf\xe9"), cwd=tmp_path)
    assert done.returncode == 127, done.stderr
    assert "Traceback" not in done.stderr and "UnicodeEncodeError" not in done.stderr


# ---- signals ----


def _handlers() -> dict[int, Any]:
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    return {number: signal.getsignal(number) for number in ending}


def test_a_wrong_signal_to_inspect_leaves_handlers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _handlers()
    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setenv("PERSEUS_INSPECT_SIGNAL", "9")
    with pytest.raises(ValueError, match="PERSEUS_INSPECT_SIGNAL=9: expected 0, 10, 12"):
        Launcher(Job(["true"], [Slot("localhost", 0, 0, 1, 0, 1)])).run()
    assert _handlers() == before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_ends_of_children_are_heard_while_a_job_runs() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    try:
        restore = signals.catch(*[lambda *_: None] * 3, writer)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        restore()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.close(reader)
        os.close(writer)


def test_a_handler_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked = _handlers(), signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGHUP else asked(number)
    )
    reader, writer = os.pipe2(os.O_NONBLOCK)
    try:
        restore = signals.catch(*[lambda *_: None] * 3, writer)
        assert asked(signal.SIGINT) is not before[signal.SIGINT]
        assert asked(signal.SIGHUP) is before[signal.SIGHUP]
        restore()
    finally:
        os.close(reader)
        os.close(writer)
    monkeypatch.undo()
    assert _handlers() == before
