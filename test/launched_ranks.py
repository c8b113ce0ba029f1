"""The program of launched_rank.c, compiled once: ranks that have no Python in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import perseus

_HERE = Path(__file__).resolve().parent
_LIBRARIES = Path(perseus.__file__).parent


def compile_rank(directory: Path) -> Path:
    """The executable. C99 with warnings as errors: the header is for C programs, too."""
    program = directory / "launched_rank"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
    command += ["-I", str(_HERE.parent / "common" / "include"), str(_HERE / "launched_rank.c")]
    command += ["-o", str(program), "-L", str(_LIBRARIES), "-lperseus", f"-Wl,-rpath,{_LIBRARIES}"]
    subprocess.run(command, check=True)
    return program


def places(output: str) -> list[list[str]]:
    """rank, size, local rank and size, cross rank and size, transport, sums: a list for each line,
    by rank; lines may have perseusrun's prefix.
    """
    return sorted(line.rpartition(":")[2].split() for line in output.splitlines())
