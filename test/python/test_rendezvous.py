"""How ranks find their store under perseusrun, under srun, and where nobody carries a message."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rendezvous_ranks import environment, found, free_port, run_ranks, script

from perseus.run.bootstrap.announcement import announcement
from perseus.run.bootstrap.identity import SINGLE, Identity
from perseus.run.bootstrap.rendezvous import _reader, find_store, first_host
from perseus.run.bootstrap.start_settings import given_secret, start_timeout, whole_number

SECRET = "0123456789abcdef"
RANK_OF_TWO = Identity(1, 2, 0, 0, 0, 0, "perseusrun")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERSEUS_SECRET", "PERSEUS_SECRET_FILE", "PERSEUS_MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_single_process_needs_no_store() -> None:
    assert find_store(SINGLE).port == 0


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMI_FD", "PMI_PORT"])
def test_ranks_of_an_unknown_launcher_are_not_worlds_of_one(name: str) -> None:
    """Such as those of prterun, which tells them by PMIx alone."""
    program = "from perseus import basics; basics.init(); print('a world of', basics.size())"
    (end,) = run_ranks([environment(**{name: "1"})], program)
    assert end.returncode != 0 and "a world of" not in end.stdout
    told = f"[rendezvous] {name}='1' comes from a launcher whose other variables are not known"
    assert told in end.stderr


@pytest.mark.parametrize("prefix", ["PERSEUS_RENDEZVOUS", "HOROVOD_GLOO_RENDEZVOUS"])
def test_perseusrun_says_where_the_store_is(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"{prefix}_ADDR", "10.1.2.3")
    monkeypatch.setenv(f"{prefix}_PORT", "4567")
    monkeypatch.setenv("PERSEUS_SECRET", SECRET)
    place = find_store(RANK_OF_TWO)
    assert (place.host, place.port, place.secret) == ("10.1.2.3", 4567, SECRET.encode())
    assert SECRET not in repr(place)


def test_secret_of_perseusrun_counts_before_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("another secret of some length")
    file.chmod(0o600)
    monkeypatch.setenv("PERSEUS_SECRET_FILE", str(file))
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_ADDR", "10.1.2.3")
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_PORT", "4567")
    monkeypatch.setenv("PERSEUS_SECRET", SECRET)
    assert find_store(RANK_OF_TWO).secret == SECRET.encode()


def test_what_perseusrun_should_have_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"PERSEUS_RENDEZVOUS_ADDR .*rank 1 of 2.*perseusrun"):
        find_store(RANK_OF_TWO)
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_ADDR", "10.1.2.3")
    monkeypatch.setenv("PERSEUS_RENDEZVOUS_PORT", "4567")
    with pytest.raises(ValueError, match=r"PERSEUS_SECRET not set"):
        find_store(RANK_OF_TWO)


def test_secret_file_is_for_its_owner_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv("PERSEUS_SECRET_FILE", str(file))
    file.chmod(0o640)
    with pytest.raises(
        ValueError, match=r"PERSEUS_SECRET_FILE='.*': others may read it; chmod 600"
    ):
        given_secret()
    file.chmod(0o600)
    assert given_secret() == SECRET.encode()
    file.write_text("short\n")
    with pytest.raises(ValueError, match=r"PERSEUS_SECRET_FILE: 5 bytes are too few"):
        given_secret()
    file.unlink()
    with pytest.raises(ValueError, match=r"PERSEUS_SECRET_FILE='.*': No such file"):
        given_secret()


def test_secret_may_come_through_a_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe = tmp_path / "secret"
    os.mkfifo(pipe, 0o600)
    monkeypatch.setenv("PERSEUS_SECRET_FILE", str(pipe))
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(pipe.write_text, SECRET + "\n")
        assert given_secret() == SECRET.encode()
        written.result()
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "1")
    with pytest.raises(ValueError, match=r"a pipe whose end did not come within 1 s"):
        given_secret()


def test_a_pipe_gives_the_secret_for_announcements_of_several_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = tmp_path / "secret"
    os.mkfifo(pipe, 0o600)
    monkeypatch.setenv("PERSEUS_SECRET_FILE", str(pipe))
    read = _reader(RANK_OF_TWO, ())
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(pipe.write_text, SECRET)
        for port in (1, 2):  # the first one is of a round that has ended
            assert read(announcement("a", port, SECRET.encode(), True)).port == port
        written.result()


@pytest.mark.parametrize("value", ["0", "65536", "x", "-1", "1.5", "²"])
def test_bad_number_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PERSEUS_MASTER_PORT", value)
    with pytest.raises(ValueError, match=rf"PERSEUS_MASTER_PORT='{value}': expected .* 1..65535"):
        whole_number("PERSEUS_MASTER_PORT", default=1, least=1, most=65535)


def test_start_timeout_knows_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSEUS_START_TIMEOUT", "7")
    monkeypatch.delenv("HOROVOD_START_TIMEOUT", raising=False)
    assert start_timeout() == 7
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "9")
    assert start_timeout() == 9


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3,7],b", "a1"),
        ("node[007-010]", "node007"),
        ("r[2,5]n[03-04],x", "r2n03"),
        ("gpu[1-2]-ib,cpu1", "gpu1-ib"),
        ("cpu1,gpu[1-2]", "cpu1"),
    ],
)
def test_first_host_of_a_compressed_list(nodelist: str, expected: str) -> None:
    assert first_host(nodelist) == expected


def srun(rank: int, **more: str) -> dict[str, str]:
    """Task `rank` of two on this host."""
    return environment(
        SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="node[3-4]", SLURM_NODEID="0",
        SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **more,
    )  # fmt: skip


def test_tasks_of_srun_meet() -> None:
    port = str(free_port())
    environments = [
        srun(rank, PERSEUS_SECRET=SECRET, PERSEUS_MASTER_PORT=port) for rank in range(2)
    ]
    for rank, end in enumerate(run_ranks(environments, script())):
        assert found(end) == [[rank, 2, rank, 2, 0, 1, "127.0.0.1", int(port), SECRET, "slurm"]]


def test_tasks_of_srun_start_again_on_the_same_port() -> None:
    port = str(free_port())
    program = """
from perseus import basics
for world in range(3):
    basics.init()
    assert basics.size() == 2
    basics.shutdown()
"""
    environments = [
        srun(rank, PERSEUS_SECRET=SECRET, PERSEUS_MASTER_PORT=port) for rank in range(2)
    ]
    for end in run_ranks(environments, program):
        assert end.returncode == 0, end.stderr


def test_jobs_of_slurm_that_share_a_host_use_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in srun(1, PERSEUS_SECRET=SECRET).items():
        monkeypatch.setenv(name, value)
    task = Identity(1, 2, 1, 2, 0, 1, "slurm")
    ports = {find_store(task).port}
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    ports.add(find_store(task).port)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    ports.add(find_store(task).port)
    assert len(ports) == 3 and min(ports) >= 6666


def test_host_of_slurm_rank_0_is_the_first_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in srun(1, PERSEUS_SECRET=SECRET).items():
        monkeypatch.setenv(name, value)
    assert find_store(Identity(1, 2, 0, 1, 1, 2, "slurm")).host == "node3"


def test_srun_without_a_secret_says_how_to_make_one() -> None:
    for end in run_ranks([srun(rank) for rank in range(2)], script()):
        assert end.returncode != 0
        assert "export PERSEUS_SECRET=$(openssl rand -hex 16) before srun" in end.stderr


def torch_by_hand(rank: int, **more: str) -> dict[str, str]:
    return environment(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **more
    )


# As on a host that has no PyTorch.
NO_TORCH = "from perseus.run.bootstrap import rendezvous; rendezvous.find_spec = lambda name: None"


def test_ranks_without_torch_meet_by_a_secret_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    port = str(free_port())
    environments = [
        torch_by_hand(rank, PERSEUS_SECRET_FILE=str(file), PERSEUS_MASTER_PORT=port)
        for rank in range(2)
    ]
    for rank, end in enumerate(run_ranks(environments, script(before=NO_TORCH))):
        assert found(end)[0][:2] == [rank, 2]
        assert found(end)[0][6:9] == ["127.0.0.1", int(port), SECRET]


@pytest.mark.parametrize("master", ["::1", "127.0.1.1", "localhost"])
def test_ranks_whose_master_is_any_loopback_address_meet(master: str) -> None:
    port = str(free_port())
    environments = [
        torch_by_hand(rank, PERSEUS_SECRET=SECRET, PERSEUS_MASTER_PORT=port)
        | {"MASTER_ADDR": master, "HOROVOD_START_TIMEOUT": "20"}
        for rank in range(2)
    ]
    for rank, end in enumerate(run_ranks(environments, script(before=NO_TORCH))):
        assert found(end)[0][:2] == [rank, 2]
        assert found(end)[0][6:8] == ["127.0.0.1", int(port)]


def test_ranks_without_torch_and_secret_are_told_what_to_do() -> None:
    for end in run_ranks([torch_by_hand(rank) for rank in range(2)], script(before=NO_TORCH)):
        assert end.returncode != 0
        assert "PERSEUS_SECRET_FILE (openssl rand -hex 16 > FILE" in end.stderr
