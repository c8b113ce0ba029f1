"""Programs without Python find their world under every launcher: the core meets by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launched_ranks import compile_rank, places
from mpi_launchers import mpi_or_skip
from rendezvous_ranks import environment, free_port

from perseus import _core

_SECRET = "0123456789abcdef0123456789abcdef"
_SUMS = {2: ["11", "22", "33"], 3: ["111", "222", "333"]}
# Rank 1 does not come, but is there for longer than rank 0 waits: mpirun might take its end for a
# failure. It ends by itself: Hydra (MPICH 5.0.2) now and then leaves the others alone when a rank
# fails. In both MPIs' names.
_STAY_AWAY = 'test "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 && exec sleep 30; exec "$0"'


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_rank(tmp_path_factory.mktemp("launched")))


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest, _no_segments_left: None) -> tuple[str, list[str], Path]:
    return str(request.param), *mpi_or_skip(str(request.param))


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def expect_worlds(result: subprocess.CompletedProcess[str], size: int, worlds: int) -> None:
    """Every rank was in every world, on this host."""
    assert result.returncode == 0, result.stderr
    lines = places(result.stdout)
    assert [line[0] for line in lines] == [str(r) for r in range(size) for _ in range(worlds)]
    assert {(line[1], line[3], line[4], line[5]) for line in lines} == {
        (f"{size}", f"{size}", "0", "1")
    }
    assert all(line[7:] == _SUMS[size] for line in lines)
    for world in range(worlds):
        assert sorted(line[2] for line in lines[world::worlds]) == [str(r) for r in range(size)]


def test_process_without_launcher_is_a_world_of_one(rank: str) -> None:
    result = run([rank, "2"])
    assert result.stdout == "0 1 0 1 0 1 none 1 2 3\n" * 2, result.stderr


def test_ranks_of_perseusrun_meet(rank: str) -> None:
    expect_worlds(run([sys.executable, "-m", "perseus.run", "-np", "2", rank, "2"]), 2, 2)


@pytest.mark.parametrize("hosts", [[], ["--host-discovery-script", "echo localhost:2"]])
def test_ranks_of_an_elastic_job_are_refused(rank: str, hosts: list[str]) -> None:
    """Without Python they get no place in a world, and would be a world of one each."""
    elastic = ["-np", "2", *(hosts or ["--min-np", "1"])]
    result = run([sys.executable, "-m", "perseus.run", *elastic, rank])
    assert (result.returncode != 0, result.stdout) == (True, ""), result.stderr
    lines = [line for line in result.stderr.splitlines() if "create 1: [rendezvous] " in line]
    assert lines, result.stderr
    assert all("HOROVOD_ELASTIC='1'" in line and "without --min-np" in line for line in lines)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_mpirun_meet(mpi: tuple[str, list[str], Path], rank: str, size: int) -> None:
    _, mpirun, _ = mpi
    result = run([*mpirun, "-np", str(size), rank, "2"])
    expect_worlds(result, size, 2)
    assert result.stderr == ""


def test_rank_that_stays_away_is_a_timeout(mpi: tuple[str, list[str], Path], rank: str) -> None:
    _, mpirun, _ = mpi
    command = [*mpirun, "-np", "2", "sh", "-c", _STAY_AWAY, rank]
    result = run(command, HOROVOD_START_TIMEOUT="1")
    assert result.returncode != 0
    expected = "create 4: [rendezvous] some rank did not arrive within 1 s (HOROVOD_START_TIMEOUT)"
    assert expected in result.stderr


def test_rank_that_fails_at_a_setting_ends_the_job(
    mpi: tuple[str, list[str], Path], rank: str
) -> None:
    _, mpirun, _ = mpi
    result = run([*mpirun, "-np", "2", rank], PERSEUS_SECRET="short")
    assert result.returncode != 0
    assert "PERSEUS_SECRET: 5 bytes are too few" in result.stderr


def test_ranks_that_know_their_place_meet(rank: str) -> None:
    """torchrun's variables and srun's, set by hand; nobody carries a message."""
    port = str(free_port())
    known = {"PERSEUS_SECRET": _SECRET, "PERSEUS_MASTER_PORT": port}
    torch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", **known}
    srun = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        **known,
    }
    for variables, rank_names in (
        (torch, ("RANK", "LOCAL_RANK")),
        (srun, ("SLURM_PROCID", "SLURM_LOCALID")),
    ):
        ranks = [
            subprocess.Popen(
                [rank],
                env=environment(**variables, **dict.fromkeys(rank_names, str(i))),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        ends = [process.communicate(timeout=300) for process in ranks]
        lines = places("".join(output for output, _ in ends))
        assert [line[:6] + line[7:] for line in lines] == [
            [str(i), "2", str(i), "2", "0", "1", *_SUMS[2]] for i in range(2)
        ], ends


def test_launcher_that_is_gone_is_one_line(rank: str) -> None:
    """Variables without the mpirun that set them, as in a shell opened by a debugger."""
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "77"}
    openmpi = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "gone",
    }
    for variables in (mpich, openmpi):
        result = run([rank], HOROVOD_START_TIMEOUT="5", **variables)
        assert result.returncode == 1
        lines = result.stderr.splitlines()
        assert lines[-1].startswith("create 3: [rendezvous] ")
        assert "start the job with perseusrun" in lines[-1]


_AFTER_MPI = r"""
import ctypes, sys
from mpi4py import MPI
core = ctypes.CDLL(sys.argv[1])
core.perseus_error_message.restype = ctypes.c_char_p
context = ctypes.c_void_p()
code = core.perseus_context_create_launched(None, ctypes.byref(context))
sys.stdout.write(f"{code} {core.perseus_error_message().decode()}\n")  # in one piece
core.perseus_context_destroy(context)
assert MPI.COMM_WORLD.allreduce(10 ** MPI.COMM_WORLD.Get_rank()) == 11
"""


def test_mpi_that_is_in_use_is_not_disturbed(mpi: tuple[str, list[str], Path]) -> None:
    kind, mpirun, python = mpi
    library = str(Path(_core.__file__).with_name("libperseus.so"))
    result = run([*mpirun, "-np", "2", str(python), "-c", _AFTER_MPI, library])
    assert result.returncode == 0, result.stderr
    expected = "0 " if kind == "openmpi" else "1 [rendezvous] MPI is initialised in this process"
    assert len(result.stdout.splitlines()) == 2
    assert all(line.startswith(expected) for line in result.stdout.splitlines()), result.stdout
