"""`perseusrun --build-xla`: compiles the XLA library for the TensorFlow that is installed here.

`python -m perseus.tensorflow.build_xla` does the same. It needs a C++ compiler and, for
TensorFlow's headers, one or two minutes of one core and 2 GiB of memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perseus import command_line
from perseus.command_line import log, show

_MEMORY_KB = 2 << 20


def _free_memory_kb() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) if found else _MEMORY_KB


def _command(tensorflow: Any, compiler: str, output: Path) -> list[str]:
    from perseus.tensorflow import xla

    include = Path(tensorflow.sysconfig.get_include())
    library = Path(tensorflow.sysconfig.get_lib())
    # Headers that TensorFlow's headers include; its wheels keep them in separate folders.
    bundled = [include / "external" / "highwayhash", include / "external/farmhash_archive/src"]
    return [
        compiler, "-O1", "-fPIC", "-shared", "-w",
        *(f"-I{folder}" for folder in [*xla.FOLDERS, *bundled]),
        *tensorflow.sysconfig.get_compile_flags(),
        *map(str, xla.sources(tensorflow)),
        f"-L{library}", "-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2",
        str(Path(__file__).resolve().parent.parent / "libperseus.so"),
        "-Wl,--no-undefined", "-o", str(output),
    ]  # fmt: skip


def build() -> Path:
    """Compile the library unless it exists; returns its path. RuntimeError if that fails."""
    import tensorflow

    from perseus.tensorflow import xla

    target = xla.place(tensorflow)
    if target.exists():
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("[xla] g++ is missing: install a C++ compiler (apt-get install g++)")
    free = _free_memory_kb()
    if free < _MEMORY_KB:
        raise RuntimeError(
            f"[xla] compiling takes {_MEMORY_KB >> 10} MiB of memory, {free >> 10} MiB are free"
        )
    show("compiling the XLA library, which takes a minute or two")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        done = subprocess.run(
            _command(tensorflow, compiler, made), capture_output=True, text=True, errors="replace"
        )
        if done.returncode != 0:
            log = target.parent / "compiler.log"
            log.write_text(done.stderr, encoding="utf-8")
            raise RuntimeError(
                f"[xla] TensorFlow {tensorflow.__version__}: g++ ended with {done.returncode}, "
                f"what it said is in {log}"
            )
        made.replace(target)  # atomically: other processes may build or start meanwhile
    return target


def main() -> int:
    """Build the library; exit status 0 if that worked."""
    return command_line.run("perseusrun", _build)


def _build() -> int:
    try:
        show(str(build()))
    except (RuntimeError, ImportError, OSError) as error:
        log(f"perseusrun: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
