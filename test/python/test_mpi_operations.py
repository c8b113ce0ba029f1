"""PERSEUS_CPU_OPERATIONS=mpi: an MPI library carries out the collectives of all ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched_ranks import compile_rank
from mpi_launchers import mpi_or_skip, with_library
from perseusrun_command import environment, perseusrun

_HERE = Path(__file__).resolve().parent
_RANK = str(_HERE / "mpi_operations_rank.py")
_KINDS = ["openmpi", "mpich"]
# Ranks that are killed, or end after an error, leave shared memory of MPI.
pytestmark = pytest.mark.usefixtures("_no_segments_left")


def mpirun(
    kind: str, size: int, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    start, _ = mpi_or_skip(kind)
    env = environment(
        PYTHONPATH=str(_HERE.parents[1]),
        PERSEUS_CPU_OPERATIONS="mpi",
        **with_library(start),
        OMPI_MCA_mpi_yield_when_idle="1",
        **variables,
    )
    return subprocess.run(
        [*start, "-np", str(size), *command],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


_SCHEDULE = {
    "PERSEUS_OFFLINE_NEG": "1",
    "PERSEUS_ALLREDUCE_DTYPE": "0",
    "PERSEUS_TRANSPORT": "tcp",
}


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        pytest.param("openmpi", {}, id="default-openmpi"),
        pytest.param("mpich", {}, id="default-mpich", marks=pytest.mark.full),
        pytest.param("openmpi", _SCHEDULE, id="schedule-openmpi", marks=pytest.mark.full),
        pytest.param("mpich", _SCHEDULE, id="schedule-mpich"),
    ],
)
def test_every_collective_gives_the_right_values_through_mpi(
    kind: str, variables: dict[str, str]
) -> None:
    done = mpirun(kind, 3, sys.executable, _RANK, **variables)
    assert done.returncode == 0, done.stderr
    sent = re.findall(r"rank \d of 3 sent (\d+) bytes itself", done.stdout)
    # The program moves more than 100 MB. Rounds, and what MPI cannot do, take Perseus' transports.
    assert len(sent) == 3 and all(int(each) < 20_000_000 for each in sent), done.stdout


@pytest.mark.parametrize("kind", _KINDS)
def test_ranks_without_python_find_each_other_through_mpi(kind: str, tmp_path: Path) -> None:
    done = mpirun(kind, 2, str(compile_rank(tmp_path)), "1")
    assert done.returncode == 0, done.stderr
    sums = sorted(line.split()[-3:] for line in done.stdout.splitlines() if line.strip())
    assert sums == [["11", "22", "33"]] * 2, done.stdout


def test_ranks_that_mpirun_has_not_started_are_told_so() -> None:
    start, _ = mpi_or_skip("openmpi")
    library = Path(with_library(start).get("MPI4PY_LIBMPI", "/usr/lib/libmpi.so.40"))
    program = "import perseus.torch as hvd; hvd.init()"
    env = environment(PERSEUS_CPU_OPERATIONS="mpi", LD_LIBRARY_PATH=str(library.parent))
    done = perseusrun("-np", "2", sys.executable, "-c", program, env=env)
    assert done.returncode != 0
    assert re.search(
        r"\[mpi\] PERSEUS_CPU_OPERATIONS=mpi: this is rank 1 of 2 for Perseus, but rank 0 of 1 for "
        rf"\S*{library.name}: start the job with that library's mpirun, or with perseusrun --mpi",
        done.stderr,
    ), done.stderr


def test_one_rank_alone_needs_no_mpi() -> None:
    program = "import torch, perseus.torch as hvd; hvd.init(); print(hvd.allreduce(torch.ones(2)))"
    env = environment(PERSEUS_CPU_OPERATIONS="mpi", PYTHONPATH=str(_HERE.parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "tensor([1., 1.])\n", done.stderr


@pytest.mark.full  # mpirun, which ends the job, took minutes once
@pytest.mark.parametrize("kind", _KINDS)
def test_a_rank_that_dies_amid_a_collective_of_mpi_ends_the_job(kind: str) -> None:
    program = """
import os, torch, perseus.torch as hvd
hvd.init()
for step in range(10**6):
    if hvd.rank() == 1 and step == 5:
        os._exit(9)
    hvd.allreduce(torch.ones(1_000_000), name="x")
"""
    done = mpirun(kind, 3, sys.executable, "-c", program, GLOO_TIMEOUT_SECONDS="5")
    assert done.returncode != 0


@pytest.mark.full
def test_counts_beyond_two_to_the_31_are_cut() -> None:
    program = """
import torch, perseus.torch as hvd
hvd.init()
mine = torch.full((2**31 + 4099,), hvd.rank() + 3, dtype=torch.uint8)
places = [0, 2**24, 2**31 - 1, 2**31, 2**31 + 4098]
for number, place in enumerate(places):
    mine[place] = 10 * (hvd.rank() + 1) + number
hvd.broadcast_(mine, 1)
assert [int(mine[place]) for place in places] == [20, 21, 22, 23, 24]
assert int(mine[1]) == int(mine[-2]) == 4 and bool((mine[2**31 + 1 : -1] == 4).all())
"""
    done = mpirun("openmpi", 2, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


_HANGS = """
import os, signal, sys, time
sys.modules["mpi4py"] = None  # so that the core begins and ends MPI
import torch, perseus.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3) * hvd.rank(), name="first")
if hvd.rank() == 1:
    {hangs}
{fails}
hvd.allreduce(torch.ones(3), name="second")
"""
_WAYS = {
    "the world fails": ("os.kill(os.getpid(), signal.SIGSTOP)", "", "rank 1"),
    "the script fails": ("time.sleep(600)", "raise ValueError('of the script')", "of the script"),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_rank_that_hangs_does_not_keep_a_job_whose_mpi_the_core_ends(kind: str, way: str) -> None:
    hangs, fails, why = _WAYS[way]
    program = _HANGS.format(hangs=hangs, fails=fails)
    done = mpirun(kind, 2, sys.executable, "-c", program, GLOO_TIMEOUT_SECONDS="3")
    assert done.returncode != 0
    assert why in done.stderr
