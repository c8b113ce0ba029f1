"""Starts real ranks through perseusrun and says what became of each check on them."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ranks.lockstep import Lockstep
from ranks.on_rank import PATHS

PARALLEL = Path(__file__).resolve().parents[1] / "parallel"
# Characters of the output that a failure shows: the stacks of a few ranks.
_SHOWN = 20000
ON_RANK = Path(__file__).with_name("on_rank.py")


def needs(*modules: str) -> None:
    """Skip a module of tests whose ranks would lack these; it does not import them itself."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"could not import {name!r}", allow_module_level=True)


def checks_of(name: str) -> list[str]:
    """The names of a module's checks, in the order they are written.

    They are read from its text: importing it would load the framework that its ranks load.
    """
    paths = [Path(folder, f"{name}.py") for folder in PATHS]
    (text,) = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    names: list[str] = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef):
            names.append(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in statement.names]
    return [each for each in names if each.startswith("check_")]


def run_ranks(ranks: int, command: list[str], timeout: float = 400.0) -> tuple[int, str]:
    """`perseusrun -np RANKS COMMAND` as (status, output); every process is gone when it returns."""
    environment = os.environ.copy()
    # Tests may run from inside a job; its identity is not theirs.
    for name in list(environment):
        if name.startswith(("PERSEUS_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            del environment[name]
    # Threads that spin for each other crawl where tests share the cores.
    environment["OMP_NUM_THREADS"] = "1"
    # TensorFlow's functions have files there, which stay where a rank is ended by a signal.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as environment["TMPDIR"]:
        # An XLA library that this user has made, in the home folder, is not the tests'.
        environment.setdefault("XDG_CACHE_HOME", environment["TMPDIR"])
        return _run(ranks, command, timeout, environment)


def _run(
    ranks: int, command: list[str], timeout: float, environment: dict[str, str]
) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "perseus.run", "-np", str(ranks), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=PARALLEL,
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        output, _ = process.communicate()
    finally:
        timer.cancel()
    if late.is_set():
        output += f"\n[test] ended after {timeout} s"
    return process.returncode, output


class Launch:
    """One run of some modules' checks on some ranks."""

    def __init__(
        self,
        checks: Mapping[str, list[str]],
        ranks: int,
        run: Callable[[list[str]], tuple[int, str]] | None = None,
    ) -> None:
        """run(command) -> (status, output) starts the ranks; without it, run_ranks does."""
        self._ranks = ranks
        # Not among pytest's own: the path of a socket is short.
        with tempfile.TemporaryDirectory(prefix="ranks-", dir="/tmp") as name:
            directory = Path(name)
            (directory / "checks").write_text(json.dumps(checks), encoding="utf-8")
            command = [sys.executable, str(ON_RANK), name]
            with Lockstep(directory, ranks) as lockstep:
                if run is None:
                    # Trainings with all codecs take minutes where others use the cores, too.
                    timeout = 300.0 + 60.0 * len(checks)
                    self.status, self.output = run_ranks(ranks, command, timeout)
                else:
                    self.status, self.output = run(command)
        self._reports = lockstep.reports
        self._abandoned = lockstep.abandoned
        # Modules that it did not get to can have another launch, but the first cannot.
        first = next(iter(checks))
        self.modules = {name.partition("::")[0] for name in self._reports} | {first}

    def expect(self, module: str, check: str) -> None:
        """Fail unless the check passed on every rank; skip where all of them skipped it."""
        reports = self._reports.get(f"{module}::{check}", [])
        # In the order in which they came: the first has the cause.
        errors = [f"on rank {each['rank']}:\n{each['error']}" for each in reports if each["error"]]
        skipped = [each["skipped"] for each in reports if each["skipped"]]
        if len(reports) < self._ranks:
            ended = sorted(each["rank"] for each in reports)
            errors.append(
                f"not run to its end, but on ranks {ended}; {self._abandoned or 'the launch ended'}"
                f" (status {self.status}):\n{self.output[-_SHOWN:]}"
            )
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        if len(skipped) == self._ranks:
            pytest.skip(skipped[0])
        assert not skipped, f"skipped on some ranks only: {skipped}"
