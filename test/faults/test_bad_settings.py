"""Settings and surroundings that cannot work: one clear line, a status that says so, no hang."""

from __future__ import annotations

import socket
import sys

import pytest
from live_ranks import PATIENCE, PROGRAM, Launch, Ranks

RAISE = {"FAULTS_RAISE": "1"}


def start_on_one_rank(directory, rank, setting):
    """`env SETTING` in front of one rank's start, by perseusrun's rank variable."""
    own = f"if [ $PERSEUS_RANK = {rank} ]; then export {setting}; fi; "
    return ["sh", "-c", f"{own} exec {sys.executable} {PROGRAM} start {directory}"]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("GLOO_TIMEOUT_SECONDS", "soon", "a whole number 0..1000000"),
        ("HOROVOD_START_TIMEOUT", "-1", "a whole number 1..1000000"),
        ("HOROVOD_CYCLE_TIME", "1e99", "a number 0..10000"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "a whole number 0..1099511627776"),
        ("PERSEUS_TRANSPORT", "pigeon", "one of auto|shm|tcp"),
        ("HOROVOD_LOG_LEVEL", "loud", "one of trace|debug|info|warning|error|fatal"),
        ("HOROVOD_STALL_CHECK_DISABLE", "perhaps", "0 or 1"),
        ("PERSEUS_MASTER_PORT", "65536", "a whole number 1..65535"),
    ],
)
def test_wrong_value_is_one_line_before_anything_starts(tmp_path, setting, value, expected):
    with Launch(tmp_path, ["start"], 2, environment={setting: value}) as launch:
        assert launch.finish() == 2
        assert launch.output == ""
        assert len(launch.errors.splitlines()) == 1
        assert f"{setting}='{value}': expected {expected}" in launch.errors
        assert launch.notes(0) == []


def test_values_may_be_written_in_capitals(tmp_path):
    environment = {
        "HOROVOD_LOG_LEVEL": "ERROR",
        "PERSEUS_TRANSPORT": "TCP",
        "HOROVOD_STALL_CHECK_DISABLE": "True",
    }
    with Launch(tmp_path, ["start"], 2, environment=environment) as launch:
        assert launch.finish() == 0, launch.everything_said()


@pytest.mark.parametrize(
    ("rank", "setting", "message"),
    [
        (1, "GLOO_TIMEOUT_SECONDS=soon", "GLOO_TIMEOUT_SECONDS='soon': expected a whole number"),
        (0, "PERSEUS_SECRET=another-secret-than-yours", "has another secret than this rank"),
        (1, "PERSEUS_RANK=2", "PERSEUS_RANK='2': expected 0..1 (PERSEUS_SIZE=2)"),
        (0, "PERSEUS_RENDEZVOUS_PORT=x", "PERSEUS_RENDEZVOUS_PORT='x': expected a whole number"),
    ],
)
def test_wrong_setting_of_one_rank_ends_the_job_and_names_it(tmp_path, rank, setting, message):
    command = start_on_one_rank(tmp_path, rank, setting)
    with Launch(tmp_path, size=2, command=command, environment=RAISE) as launch:
        assert launch.finish() == 1
        lines = [line for line in launch.errors.splitlines() if message in line]
        assert len(lines) == 1, launch.errors
        assert lines[0].startswith(f"[{rank}]<stderr>:perseus.errors.InitializationError: Horovod")
        assert f"rank {rank} on localhost was the first to fail" in launch.errors.splitlines()[-1]


def test_settings_that_differ_are_an_error_on_every_rank(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False) as ranks:
        for rank in range(3):
            ranks.start(rank, PERSEUS_ALLREDUCE_STREAMS="2" if rank == 1 else "4")
        for rank in range(3):
            text = ranks.note(rank, "error")["text"]
            assert f"ranks {rank} and " in text and "are configured differently: " in text
            both = ["PERSEUS_ALLREDUCE_STREAMS=2", "PERSEUS_ALLREDUCE_STREAMS=4"]
            assert all(value in text for value in both)
            assert "1" in text.partition(" are configured")[0].partition("ranks ")[2].split(" and ")
            assert ranks.finish(rank) == 0


def test_interface_that_does_not_exist_is_named_with_those_that_do(tmp_path):
    environment = {"PERSEUS_TRANSPORT": "tcp", "PERSEUS_GLOO_NETWORK_INTERFACE": "nope0", **RAISE}
    with Launch(tmp_path, ["start"], 2, environment=environment) as launch:
        assert launch.finish() == 1
        assert "PERSEUS_GLOO_NETWORK_INTERFACE names 'nope0', which does not exist" in launch.errors
        assert "this host has " in launch.errors and " lo" in launch.errors


@pytest.mark.parametrize("kib", [8, 256])
def test_too_little_shared_memory_is_an_error_of_the_start(tmp_path, kib):
    # A limit on file sizes hits memfd segments as well; Python ignores its signal.
    limit = ["prlimit", f"--fsize={kib * 1024}"]
    with Ranks(tmp_path, ["start"], 2, start=False, PERSEUS_TRANSPORT="shm") as ranks:
        for rank in range(2):
            ranks.start(rank, limit)
        for rank in range(2):
            error = ranks.note(rank, "error")
            assert error["kind"] == "InitializationError"
            assert "[shm] cannot reserve 512 KiB of shared memory" in error["text"]
            assert "PERSEUS_TRANSPORT=tcp" in error["text"]
            assert len(error["text"].splitlines()) == 1
            assert ranks.finish(rank) == 0


def test_rank_without_shared_memory_uses_tcp_and_says_so_once(tmp_path):
    with Ranks(tmp_path, ["leave", "done"], 3, start=False) as ranks:
        for rank in range(3):
            ranks.start(rank, ["prlimit", f"--fsize={8 * 1024}"] if rank == 1 else [])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        assert [ranks.output(rank) for rank in (0, 2)] == ["", ""]
        assert len(ranks.output(1).splitlines()) == 1
        assert "[shm] cannot reserve 512 KiB of shared memory" in ranks.output(1)
        assert "this rank uses TCP inside its host" in ranks.output(1)


def test_too_little_shared_memory_does_not_matter_over_tcp(tmp_path):
    with Ranks(tmp_path, ["start"], 2, start=False, PERSEUS_TRANSPORT="tcp") as ranks:
        for rank in range(2):
            ranks.start(rank, ["prlimit", f"--fsize={8 * 1024}"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(2)] == [0, 0]


def test_port_that_is_taken_makes_way_for_the_next():
    # Ranks of torchrun and mpirun: rank 0 runs the store.
    from perseus._core import StoreServer

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = StoreServer("127.0.0.1", port, True, b"0123456789abcdef")
        assert port < server.port <= port + 100
        server.close()
        with pytest.raises(Exception, match=f"{port}.*set PERSEUS_MASTER_PORT or stop"):
            StoreServer("127.0.0.1", port, False, b"0123456789abcdef")


def test_store_that_nobody_runs_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = str(closed.getsockname()[1])
    environment = {"PERSEUS_RENDEZVOUS_PORT": port, "HOROVOD_START_TIMEOUT": "2"}
    with Ranks(tmp_path, ["start"], 2, **environment) as ranks:
        for rank in range(2):
            error = ranks.note(rank, "error")
            assert f"no store server at 127.0.0.1:{port} in time" in error["text"]
            assert ranks.finish(rank) == 0


def test_store_port_of_another_service_is_recognised(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(PATIENCE)
        environment = {"PERSEUS_RENDEZVOUS_PORT": str(other.getsockname()[1])}
        with Ranks(tmp_path, ["start"], 2, start=False, **environment) as ranks:
            ranks.start(0)
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 2)
                error = ranks.note(0, "error")
            assert "answers, but is not a Perseus store server" in error["text"]
            assert ranks.finish(0) == 0
