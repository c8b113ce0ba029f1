"""perseusrun --mpi: Open MPI's or MPICH's mpirun starts the ranks, with what the flags say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi_launchers import mpi_or_skip
from perseusrun_command import environment, perseusrun

from perseus.run.hosts import Host, place
from perseus.run.launch import Job, LaunchError
from perseus.run.mpirun import Mpirun, _of_mpirun, command_line, find, of_ranks, start

_ROOT = Path(__file__).resolve().parents[2]
# Joins the world and says where this rank is in it.
_RANK = r"""
import os
from perseus import basics
basics.init()
found = [os.environ.get(name) for name in ("GLOO_TIMEOUT_SECONDS", "TEXT", "PERSEUS_RANK")]
place = (basics.rank(), basics.size(), basics.local_rank(), basics.local_size())
os.write(1, ("rank %d %d %d %d " % place + f"{found}\n").encode())  # whole: MPICH cuts lines
basics.shutdown()
"""
OPEN_MPI_4, OPEN_MPI_5, MPICH = Mpirun("mpirun", 4), Mpirun("mpirun", 5), Mpirun("mpirun", None)


def job(**fields: Any) -> Job:
    return Job(["train", "-x"], place([Host("a", 2), Host("b", 9)], 3), **fields)


def words(mpirun: Mpirun, variables: dict[str, str] | None = None, **fields: Any) -> str:
    made = command_line(mpirun, job(**fields), ["--own", "1"], variables or {}, as_root=True)
    return " ".join(made)


def variables_of_mpich(mpirun: Mpirun, **fields: Any) -> dict[str, str]:
    return _of_mpirun(mpirun, job(**fields))


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_ranks_of_mpirun_are_one_world_with_the_flags_of_the_job(kind: str) -> None:
    mpirun, python = mpi_or_skip(kind)
    text = "a 'b' $c\né"
    env = environment(
        PATH=f"{Path(mpirun[0]).parent}:{os.environ['PATH']}", PYTHONPATH=str(_ROOT),
        TEXT=text, PERSEUS_RANK="7", PERSEUS_SECRET="outer" * 8, RANK="0", WORLD_SIZE="1",
    )  # fmt: skip
    flags = ["--mpi", "-np", "3", "--gloo-timeout-seconds", "17"]
    ranks = [str(python), "-c", _RANK]
    command = [str(python), "-m", "perseus.run", *flags, *ranks]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line[line.index("rank ") :] for line in done.stdout.splitlines()]
    assert sorted(said) == [f"rank {rank} 3 {rank} 3 ['17', {text!r}, None]" for rank in range(3)]
    head = "[1,0]<stdout>: " if kind == "openmpi" else "[0] "
    assert f"{head}rank 0 3" in done.stdout


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_status_of_mpirun_is_perseusruns(kind: str) -> None:
    mpirun, _ = mpi_or_skip(kind)
    env = environment(PATH=f"{Path(mpirun[0]).parent}:{os.environ['PATH']}")
    assert perseusrun("--mpi", "-np", "1", "sh", "-c", "exit 6", env=env).returncode == 6


def test_command_line_of_open_mpi() -> None:
    expected = (
        "mpirun -np 3 --host a:2,b:1 --tag-output --bind-to none --map-by slot "
        "--allow-run-as-root --own 1 train -x"
    )
    assert words(OPEN_MPI_4) == words(OPEN_MPI_5) == expected
    fields = {"interfaces": ["e0", "e1"], "ssh_port": 22, "ssh_accept_new_keys": True}
    assert (
        "--mca btl_tcp_if_include e0,e1 --mca oob_tcp_if_include e0,e1 "
        "--mca plm_rsh_args -p 22 -o StrictHostKeyChecking=accept-new "
    ) in words(OPEN_MPI_4, **fields)
    assert (
        "--mca btl_tcp_if_include e0,e1 --prtemca oob_tcp_if_include e0,e1 "
        "--prtemca plm_ssh_args -p 22 -o StrictHostKeyChecking=accept-new "
    ) in words(OPEN_MPI_5, **fields)


def test_identity_file_that_mpirun_would_split_is_refused() -> None:
    message = "-i '/my keys/id': mpirun would split this name at its blanks"
    for mpirun, made in ((OPEN_MPI_4, words), (OPEN_MPI_5, words), (MPICH, variables_of_mpich)):
        with pytest.raises(LaunchError, match=message) as error:
            made(mpirun, ssh_identity_file="/my keys/id")
        assert error.value.code == 2
    assert "-i /keys/id" in words(OPEN_MPI_5, ssh_identity_file="/keys/id")
    expected = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-i /keys/id"}
    assert variables_of_mpich(MPICH, ssh_identity_file="/keys/id") == expected


def test_ipv6_address_that_mpirun_would_split_is_refused() -> None:
    slots = place([Host("fd00::1", 2)], 2)
    for mpirun in (OPEN_MPI_4, OPEN_MPI_5, MPICH):
        with pytest.raises(
            LaunchError, match="mpirun takes no IPv6 address such as fd00::1"
        ) as error:
            command_line(mpirun, Job(["train"], slots), [], {}, as_root=False)
        assert error.value.code == 2


def test_open_mpi_is_told_names_of_variables_and_no_values() -> None:
    variables = {"B": "beta", "A": "alpha", "OMPI_MCA_x": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert "-x A -x B --own" in words(OPEN_MPI_5, variables)
    assert not any(value in words(OPEN_MPI_5, variables) for value in ("alpha", "OMPI", "CUDA"))


def test_command_line_of_mpich() -> None:
    expected = "mpirun -np 3 -hosts a:2,b:1 -prepend-rank -iface e0 -bind-to none"
    variables = {"B": "beta", "A": "alpha", "CUDA_VISIBLE_DEVICES": "1", "PMI_RANK": "2"}
    made = words(MPICH, variables, interfaces=["e0", "e1"])
    assert made == f"{expected} -genvlist A,B --own 1 train -x"
    with pytest.raises(LaunchError, match="--output-filename: MPICH's mpirun cannot do that"):
        words(MPICH, output_directory="logs")


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_binding_arguments_bind_ranks_to_cores(kind: str) -> None:
    mpirun, python = mpi_or_skip(kind)
    env = environment(PATH=f"{Path(mpirun[0]).parent}:{os.environ['PATH']}")
    program = "import os; print(len(os.sched_getaffinity(0)))"
    ranks = [str(python), "-c", program]
    binding = "--bind-to core" if kind == "openmpi" else "-bind-to core"
    for flags, cores in ([], len(os.sched_getaffinity(0))), ([f"--binding-args={binding}"], 1):
        done = perseusrun("--mpi", "-np", "1", *flags, *ranks, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == str(cores)


def test_ranks_inherit_no_identity_of_an_outer_job() -> None:
    given = {"PERSEUS_RANK": "3", "PERSEUS_SECRET": "s", "KEPT": "1", "PERSEUS_LOG_LEVEL": "info"}
    given |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = of_ranks(given, job(interfaces=["e0"], flags={"PERSEUS_LOG_LEVEL": "debug"}))
    assert found == {
        "KEPT": "1",
        "PERSEUS_LOG_LEVEL": "debug",
        "PERSEUS_GLOO_NETWORK_INTERFACE": "e0",
        "HOROVOD_GLOO_IFACE": "e0",
        "NCCL_SOCKET_IFNAME": "=e0",
    }


def test_mpirun_starts_with_the_default_actions_of_signals(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    script = "case $1 in --version) echo '(Open MPI) 5';; *) grep SigIgn /proc/self/status;; esac"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = perseusrun("--mpi", "-np", "1", "true", env=env)
    assert done.returncode == 0, done.stderr
    ignored = int(done.stdout.split()[1], 16)
    assert not any(ignored >> (n - 1) & 1 for n in (signal.SIGPIPE, signal.SIGXFSZ))


def test_an_mpirun_that_cannot_start_leaves_signals_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perseus.run.mpirun.find", lambda: Mpirun("/nowhere/mpirun", 5))
    before = [signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)]
    with pytest.raises(LaunchError, match="/nowhere/mpirun: No such file") as error:
        start(job(), [], [])
    assert error.value.code == 126
    assert before == [signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)]


def test_missing_and_unknown_mpiruns_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"there is no mpirun on PATH .*; install Open MPI or"):
        find()
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho 'Another MPI 7'\n")
    fake.chmod(0o755)
    with pytest.raises(LaunchError, match=f"{fake} is neither Open MPI's nor .* 'Another MPI 7'"):
        find()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "1", "--mpi", "--gloo", "true"], "not allowed with argument"),
        (
            ["-np", "1", "--mpi-args=-x A", "true"],
            "--mpi-args needs --mpi: they are arguments of mpirun",
        ),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], message: str) -> None:
    result = perseusrun(*arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line
