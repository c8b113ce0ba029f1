"""Runs scripts for torch.distributed, on Perseus or, without their import of it, on gloo."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
_IMPORT = re.compile(r"^import perseus .*\n", re.MULTILINE)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_LIMIT = 240.0  # seconds, less than pytest gives a test


def environment() -> dict[str, str]:
    """This process's, with this clone's package and without the identity of a rank."""
    own = {name: os.environ[name] for name in os.environ if not name.startswith("PERSEUS_")}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(
    launcher: tuple[str, ...], script: Path, *arguments: str, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """`python LAUNCHER SCRIPT ARGUMENTS`, whose ranks have all ended when the block has.

    A limit of time ends them, too: a read of their output then comes to its end.
    """
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), *arguments],
        env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(_LIMIT, _end, (process,))
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        _end(process)
        assert process.stdout is not None
        process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """torchrun ends its ranks itself, on SIGTERM; Lightning's are of the same process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)  # torchrun gives them 30 s
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The output up to the line with `text`, which must come."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if text in line:
            return lines
    raise AssertionError(lines)


def run_script(launcher: tuple[str, ...], script: Path, *arguments: str) -> str:
    """Its output; it must end well."""
    with started(launcher, script, *arguments) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def without_perseus(example: Path, folder: Path) -> Path:
    """A copy that does not import perseus."""
    text, count = _IMPORT.subn("", example.read_text(encoding="utf-8"))
    assert count == 1
    copy = folder / example.name
    copy.write_text(text, encoding="utf-8")
    return copy
