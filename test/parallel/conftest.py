"""Starts real ranks through perseusrun and hands their results to tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


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
        cwd=HERE,
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
    """One run of modules' checks on some ranks."""

    def __init__(self, modules: list[str], ranks: int, directory: Path) -> None:
        command = [sys.executable, str(HERE / "run_checks.py"), str(directory), *modules]
        # Trainings with all codecs take minutes by themselves where others use the cores, too.
        self.status, self.output = run_ranks(ranks, command, timeout=300.0 + 60.0 * len(modules))
        self.outcomes: dict[str, Outcome] = {}
        for module in modules:
            results: list[dict[str, str]] = []
            for rank in range(ranks):
                path = directory / f"{module}-{rank}.json"
                text = path.read_text(encoding="utf-8") if path.exists() else "{}"
                results.append(json.loads(text))
            # The modules after one that failed did not run.
            if any(results) or not self.outcomes:
                self.outcomes[module] = Outcome(self, results)


class Outcome:
    """What became of one module's checks."""

    def __init__(self, launch: Launch, results: list[dict[str, str]]) -> None:
        self.launch = launch
        self.results = results

    def expect(self, check: str) -> None:
        """Fail unless the check passed on every rank."""
        for rank, results in enumerate(self.results):
            error = results.get(check)
            failed = [name for other in self.results for name, text in other.items() if text]
            if error is None and failed and check not in failed:
                pytest.fail(f"not run, since {failed[0]} failed before", pytrace=False)
            if error is None:
                pytest.fail(
                    f"not run on rank {rank}; the launch ended with {self.launch.status}:\n"
                    f"{self.launch.output[-4000:]}",
                    pytrace=False,
                )
            if error:
                pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)


def pytest_collection_modifyitems(items):
    """Whatever test comes first waits for a whole launch, which has a time limit of its own."""
    for item in items:
        if "outcome_of" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def outcome_of(request, tmp_path_factory):
    """outcome_of(module, ranks) -> Outcome.

    What is asked for first starts all modules that this session tests on so many ranks, in one
    launch: most of a launch is importing PyTorch. Where a check fails, another one runs the rest.
    """
    wanted: dict[int, dict[str, None]] = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if {"module", "ranks"} <= parameters.keys():
            wanted.setdefault(parameters["ranks"], {})[parameters["module"]] = None
    done: dict[tuple[str, int], Outcome] = {}

    def outcome(module: str, ranks: int) -> Outcome:
        while (module, ranks) not in done:
            rest = [name for name in wanted[ranks] if (name, ranks) not in done]
            launch = Launch(rest, ranks, tmp_path_factory.mktemp(f"{rest[0]}-{ranks}"))
            done.update({(name, ranks): found for name, found in launch.outcomes.items()})
        return done[module, ranks]

    return outcome
