"""Every launcher's variables, their precedence, and one clear error for inconsistent values."""

from __future__ import annotations

import socket
import threading

import pytest

from perseus.run.bootstrap import membership
from perseus.run.bootstrap.identity import SINGLE, Identity, identify

PERSEUSRUN = {
    "PERSEUS_RANK": "5",
    "PERSEUS_SIZE": "6",
    "PERSEUS_LOCAL_RANK": "1",
    "PERSEUS_LOCAL_SIZE": "2",
    "PERSEUS_CROSS_RANK": "2",
    "PERSEUS_CROSS_SIZE": "3",
}
HOROVOD = {name.replace("PERSEUS", "HOROVOD"): value for name, value in PERSEUSRUN.items()}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "6", "PMI_SIZE": "7", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PERSEUSRUN, *HOROVOD, *TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, SINGLE),
        (PERSEUSRUN, Identity(5, 6, 1, 2, 2, 3, "perseusrun")),
        (HOROVOD, Identity(5, 6, 1, 2, 2, 3, "perseusrun")),
        (TORCH, Identity(3, 4, 0, 0, 0, 0, "torch")),
        ({**TORCH, "LOCAL_RANK": "1"}, Identity(3, 4, 0, 0, 0, 0, "torch")),
        (TORCHRUN, Identity(3, 4, 1, 2, 0, 0, "torch")),
        (OPEN_MPI, Identity(2, 8, 2, 4, 0, 0, "openmpi")),
        (HYDRA, Identity(6, 7, 2, 3, 0, 0, "mpich")),
        (SRUN, Identity(4, 7, 0, 2, 2, 4, "slurm")),
        ({**SRUN, "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, Identity(5, 7, 1, 2, 2, 3, "slurm")),
    ],
)
def test_launcher_is_recognised(environment: dict[str, str], expected: Identity) -> None:
    assert identify(environment) == expected


def test_without_a_mapping_it_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identify() == SINGLE
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert identify() == Identity(3, 4, 1, 2, 0, 0, "torch")
    assert identify({}) == SINGLE
    monkeypatch.setenv("RANK", "\udcff")  # a byte that is no UTF-8
    with pytest.raises(ValueError, match=r"^\[identity\] RANK='.': expected a whole number, 0"):
        identify()


def test_batch_script_of_slurm_is_a_single_process() -> None:
    assert identify(BATCH) == SINGLE


def test_srun_without_counts_per_node_leaves_hosts_to_the_core() -> None:
    environment = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_TASKS_PER_NODE"}
    assert identify(environment) == Identity(4, 7, 0, 0, 0, 0, "slurm")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({**SRUN, **OPEN_MPI}, "openmpi"),  # mpirun inside an allocation
        ({**SRUN, **HYDRA}, "mpich"),
        ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "7"}, "slurm"),  # srun --mpi=pmi2
        ({**OPEN_MPI, **TORCHRUN}, "torch"),  # mpirun starts one torchrun a host
        ({**SRUN, **TORCHRUN}, "torch"),
        ({**TORCHRUN, **HOROVOD, **SRUN, **OPEN_MPI}, "perseusrun"),
    ],
)
def test_inner_launcher_wins(environment: dict[str, str], launcher: str) -> None:
    assert identify(environment).launcher == launcher


@pytest.mark.parametrize(("outer", "prefix"), [(PERSEUSRUN, "PERSEUS"), (HOROVOD, "HOROVOD")])
def test_torchrun_inside_a_rank_of_perseusrun_is_told_whose_variables_remain(
    outer: dict[str, str], prefix: str
) -> None:
    inside = {**outer, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    expected = (
        rf"^\[identity\] {prefix}_RANK=5 and {prefix}_SIZE=6 belong to an outer job of perseusrun, "
        r"inside of which torchrun has started this process as rank 3 of 4 \(RANK, WORLD_SIZE\): "
    )
    with pytest.raises(ValueError, match=expected):
        identify(inside)


def test_torchs_variables_that_agree_with_perseusruns_are_no_conflict() -> None:
    agreeing = {"RANK": "5", "WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "none"}
    assert identify({**PERSEUSRUN, **agreeing}).launcher == "perseusrun"
    by_the_script = {"RANK": "0", "WORLD_SIZE": "2"}  # for a torch.distributed of its own
    assert identify({**PERSEUSRUN, **by_the_script}).rank == 5


def test_perseus_names_win_over_horovod_ones() -> None:
    assert identify({**HOROVOD, "PERSEUS_RANK": "0", "PERSEUS_SIZE": "2"}).size == 2


def test_lone_rank_variable_of_something_else_means_nothing() -> None:
    assert identify({"RANK": "private", "PMI_SIZE": "3", "WORLD_SIZE": ""}) == SINGLE


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**PERSEUSRUN, "PERSEUS_RANK": "6"},
            r"PERSEUS_RANK='6': expected 0\.\.5 \(PERSEUS_SIZE=6\)",
        ),
        ({**PERSEUSRUN, "PERSEUS_SIZE": "six"}, r"PERSEUS_SIZE='six': expected a whole number"),
        ({**PERSEUSRUN, "PERSEUS_SIZE": "0"}, r"PERSEUS_SIZE='0': expected a whole number, 1"),
        ({**PERSEUSRUN, "PERSEUS_LOCAL_RANK": "2"}, r"PERSEUS_LOCAL_RANK='2': expected 0\.\.1"),
        ({**PERSEUSRUN, "PERSEUS_LOCAL_SIZE": "9"}, r"PERSEUS_LOCAL_SIZE='9': expected at most"),
        ({"PERSEUS_RANK": "1"}, r"PERSEUS_RANK='1' without PERSEUS_SIZE"),
        ({"HOROVOD_SIZE": "2"}, r"HOROVOD_SIZE='2' without HOROVOD_RANK"),
        ({**TORCH, "RANK": "-1"}, r"RANK='-1': expected a whole number, 0"),
        ({**TORCH, "RANK": "²"}, r"RANK='²': expected a whole number"),
        ({**TORCH, "RANK": "9" * 30}, rf"RANK='{'9' * 30}': expected 0\.\.3 \(WORLD_SIZE=4\)"),
        ({**TORCH, "WORLD_SIZE": "9" * 30}, rf"WORLD_SIZE='{'9' * 30}': expected at most 1000000"),
        ({**TORCH, "WORLD_SIZE": "1"}, r"RANK='3': expected 0\.\.0 \(WORLD_SIZE=1\)"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, r"OMPI_COMM_WORLD_LOCAL_RANK='x'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,x"}, r"SLURM_STEP_TASKS_PER_NODE='2,x'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, r"SLURM_STEP_TASKS_PER_NODE='2\(x4\)'"),
        ({**SRUN, "SLURM_NODEID": "4"}, r"SLURM_NODEID=4"),
    ],
)
def test_value_that_does_not_fit_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        identify(environment)
    assert "\n" not in str(caught.value)


def test_identity_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SINGLE.rank = 1  # type: ignore[misc]


def test_a_rank_whose_thread_cannot_be_started_is_still_one_of_an_elastic_job(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(membership.CONTROL_VARIABLE, str(ours.detach()))
    monkeypatch.setattr(membership, "_membership", None)
    with theirs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                membership.membership()
        member = membership.membership()
        assert member is not None and membership.membership() is member
        theirs.sendall(b'{"place": {}}\n')
        with pytest.raises(RuntimeError, match="is nothing that perseusrun says"):
            member.join()
    member._socket.close()
