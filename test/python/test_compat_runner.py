"""The parts of Horovod's runner that exist under the alias: hosts, threads, rank variables."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from perseus.compat import hosts, rank_variables, threads


def test_host_lists_and_files(tmp_path: Path) -> None:
    parsed = hosts.parse_hosts("a:2,10.0.0.1:4")
    assert [(host.hostname, host.slots) for host in parsed] == [("a", 2), ("10.0.0.1", 4)]
    assert hosts.parse_hosts_and_slots("a:2,b:4") == (["a", "b"], {"a": 2, "b": 4})
    one = hosts.HostInfo.from_string(" c:3")
    assert (one.hostname, one.slots) == ("c", 3)
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n\n# none\nb slots=1\n", encoding="utf-8")
    assert hosts.parse_host_files(str(file)) == "a:2,b:1"
    with pytest.raises(ValueError, match="Invalid host input"):
        hosts.parse_hosts("a:x")


def test_ranks_fill_host_after_host() -> None:
    places = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3"), 1, 4)
    assert [place.to_response_string() for place in places] == [
        "0,4,0,2,0,2",
        "1,4,1,2,0,2",
        "2,4,0,2,1,2",
        "3,4,1,2,1,2",
    ]
    assert [place.hostname for place in places] == ["a", "a", "b", "b"]
    assert places[3] == hosts.SlotInfo("b", 3, 1, 1, 4, 2, 2)
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3"), 1)) == 5
    with pytest.raises(ValueError, match=r"more processes \(6\) than there are available slots"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3"), 6)


def test_thread_runs_with_its_arguments_and_may_fail_silently(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done: list[tuple[int, str]] = []
    thread = threads.in_thread(lambda n, name: done.append((n, name)), (3, "x"), name="mine")
    thread.join(60)
    assert done == [(3, "x")] and thread.name == "mine" and thread.daemon
    threads.in_thread(lambda: 1 // 0, silent=True).join(60)
    assert "ZeroDivisionError" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="args must be a tuple"):
        threads.in_thread(print, [1])  # type: ignore[arg-type]


def test_function_runs_on_the_event_unless_stopped() -> None:
    done: list[int] = []
    event, stop = threading.Event(), threading.Event()
    thread = threads.on_event(event, done.append, (5,), stop=stop, check_stop_interval_s=0.01)
    event.set()
    thread.join(60)
    assert done == [5]
    stopped = threads.on_event(
        threading.Event(), done.append, (6,), stop=stop, check_stop_interval_s=0.01
    )
    stop.set()
    stopped.join(60)
    assert not stopped.is_alive() and done == [5]
    with pytest.raises(ValueError, match="Stop event must be given"):
        threads.on_event(event, print, daemon=False)


def test_rank_and_size_of_each_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for pair in rank_variables._LAUNCHERS for name in pair]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert rank_variables.get_env_rank_and_size() == (0, 1)
    for rank, (rank_name, size_name) in reversed(list(enumerate(rank_variables._LAUNCHERS))):
        monkeypatch.setenv(rank_name, str(rank))
        monkeypatch.setenv(size_name, str(10 + rank))
        assert rank_variables.get_env_rank_and_size() == (rank, 10 + rank)
    monkeypatch.delenv("HOROVOD_SIZE")
    with pytest.raises(RuntimeError, match="only one of HOROVOD_RANK and HOROVOD_SIZE"):
        rank_variables.get_env_rank_and_size()
