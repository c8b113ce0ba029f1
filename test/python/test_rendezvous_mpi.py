"""Ranks of a bare mpirun meet through mpi4py and leave MPI to the script: Open MPI and MPICH."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mpi_launchers import mpi_or_skip
from rendezvous_ranks import environment, script

_ROOT = Path(__file__).resolve().parents[2]
# The script's own use of MPI after (or before) Perseus'.
_OWN_USE = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(10 ** MPI.COMM_WORLD.Get_rank()) == 111
"""


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest, _no_segments_left: None) -> tuple[str, list[str], Path]:
    """Which MPI, the start of its command line, and the python to run."""
    return str(request.param), *mpi_or_skip(str(request.param))


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment(PYTHONPATH=str(_ROOT), **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_meet_and_mpi_stays_the_scripts(mpi: tuple[str, list[str], Path], when: str) -> None:
    kind, mpirun, python = mpi
    program = script(worlds=2, **{when: _OWN_USE})
    result = run([*mpirun, "-np", "3", str(python), "-c", program])
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert len(re.findall(rf"\[{rank}, 3, \d, 3, 0, 1, ", result.stdout)) == 2
    secrets = re.findall(rf'"([0-9a-f]{{64}})", "{kind}"', result.stdout)
    assert len(secrets) == 6 and len(set(secrets)) == 1  # ranks meet once, for all their worlds


def test_ranks_without_mpi4py_meet_through_the_launcher(mpi: tuple[str, list[str], Path]) -> None:
    kind, mpirun, python = mpi
    hide = "import sys; sys.modules['mpi4py'] = None"
    result = run([*mpirun, "-np", "3", str(python), "-c", script(worlds=2, before=hide)])
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert len(re.findall(rf"\[{rank}, 3, \d, 3, 0, 1, ", result.stdout)) == 2
    secrets = re.findall(rf'"([0-9a-f]{{64}})", "{kind}"', result.stdout)
    assert len(secrets) == 6 and len(set(secrets)) == 1


_OTHER_SECRET = "import os\nif os.environ[{rank!r}] == '1': os.environ['PERSEUS_SECRET'] += '!'\n"


def test_a_given_secret_is_compared_by_the_ranks(mpi: tuple[str, list[str], Path]) -> None:
    kind, mpirun, python = mpi
    secret = "a secret of these ranks alone"
    command = [*mpirun, "-np", "2", str(python), "-c"]
    result = run([*command, script()], PERSEUS_SECRET=secret)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f'"{secret}", "{kind}"') == 2
    rank = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[kind]
    other = _OTHER_SECRET.format(rank=rank)
    result = run([*command, script(before=other)], PERSEUS_SECRET=secret)
    assert result.returncode != 0
    assert "[rendezvous] rank 1 has another secret than rank 0: give all ranks" in result.stderr
    assert secret not in result.stderr


# Ranks that fail end normally here, as mpirun ends the others soon after one that does not.
_SHORT_SECRET_OF_0 = """
import time
if os.environ[{rank!r}] == '0':
    os.environ['PERSEUS_SECRET'] = 'too short'
try:
    begin = time.monotonic()
    find_store(identify())
except ValueError as error:
    assert time.monotonic() - begin < 60
    print(os.environ[{rank!r}], error, flush=True)
    raise SystemExit(0)
"""


def test_what_keeps_rank_0_from_starting_is_told_to_all(mpi: tuple[str, list[str], Path]) -> None:
    kind, mpirun, python = mpi
    rank = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[kind]
    program = script(before=_SHORT_SECRET_OF_0.format(rank=rank))
    result = run([*mpirun, "-np", "3", str(python), "-c", program], HOROVOD_START_TIMEOUT="60")
    assert result.returncode == 0, result.stderr
    why = "[rendezvous] PERSEUS_SECRET: 9 bytes are too few"
    assert f"0 {why}" in result.stdout
    for other in (1, 2):
        assert f"{other} [rendezvous] rank 0 could not start: {why}" in result.stdout


def test_mpi4py_of_another_mpi_is_named(mpi: tuple[str, list[str], Path]) -> None:
    """What mpi4py shows then: worlds of one rank each."""
    _, mpirun, python = mpi
    alone = (
        "import types, sys, mpi4py.MPI as real; fake = types.ModuleType('mpi4py.MPI');"
        "fake.COMM_WORLD = real.COMM_SELF; fake.Is_initialized = real.Is_initialized;"
        "fake.Get_library_version = real.Get_library_version; sys.modules['mpi4py.MPI'] = fake"
    )
    result = run([*mpirun, "-np", "2", str(python), "-c", script(before=alone)])
    assert result.returncode != 0
    assert "mpirun started 2 ranks, but mpi4py sees 1" in result.stderr


_HANGS = """
import os, signal, time
from mpi4py import MPI  # whose start waits for all ranks, for ever
from perseus import basics, control
rank = int(os.environ[{rank!r}])
if rank == 1 and {when!r} == "before init()":
    time.sleep(600)
basics.init()
control.gather_lines("", "first")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
control.gather_lines("", "second")
"""


@pytest.mark.parametrize("when", ["before init()", "in training"])
def test_a_rank_that_hangs_does_not_keep_the_job(
    mpi: tuple[str, list[str], Path], when: str
) -> None:
    """Although MPI_Finalize, which mpi4py calls, waits for it."""
    kind, mpirun, python = mpi
    segments = Path("/dev/shm")
    before = {*segments.glob("mpich_shm_*"), *segments.glob("sm_segment.*")}
    rank = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[kind]
    program = _HANGS.format(rank=rank, when=when)
    result = run(
        [*mpirun, "-np", "2", str(python), "-c", program],
        GLOO_TIMEOUT_SECONDS="3",
        HOROVOD_START_TIMEOUT="10" if when == "before init()" else "60",
    )
    assert result.returncode != 0
    why = {"before init()": "some rank did not call init() within 10 s", "in training": "rank 1"}
    assert why[when] in result.stderr
    # What MPI itself leaves where a job is aborted.
    for left in {*segments.glob("mpich_shm_*"), *segments.glob("sm_segment.*")} - before:
        left.unlink()


_LATE = """
import os, time
if os.environ[{rank!r}] == "1":
    time.sleep(4)
begin = time.monotonic()
try:
    find_store(identify())
except TimeoutError as error:
    print("first", error, flush=True)
try:
    find_store(identify())
except TimeoutError as error:
    print("again", error, flush=True)
os._exit(0)
"""


def test_what_mpi_has_begun_is_not_begun_again(mpi: tuple[str, list[str], Path]) -> None:
    kind, mpirun, python = mpi
    rank = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[kind]
    program = script(before=_LATE.format(rank=rank))
    result = run([*mpirun, "-np", "2", str(python), "-c", program], HOROVOD_START_TIMEOUT="2")
    assert "first [rendezvous] some rank did not call init() within 2 s" in result.stdout
    assert "again [rendezvous] an earlier init() has waited in vain" in result.stdout


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_mpi4py_without_its_mpi_is_named(
    mpi: tuple[str, list[str], Path], tmp_path: Path, error: str
) -> None:
    _, mpirun, python = mpi
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").touch()
    text = "cannot load MPI library\\nlibmpi.so.40: cannot open shared object file"
    (tmp_path / "mpi4py/MPI.py").write_text(f"raise {error}('{text}')")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    result = run([*mpirun, "-np", "2", str(python), "-c", script(before=first)])
    assert result.returncode != 0
    assert "mpi4py is installed but does not find its MPI (cannot load MPI library" in result.stderr
    assert "uninstall it, or start with perseusrun" in result.stderr
