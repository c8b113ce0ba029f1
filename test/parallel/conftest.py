"""Starts real ranks through perseusrun and hands their results to tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def run_ranks(ranks: int, command: list[str], timeout: float = 100.0) -> tuple[int, str]:
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
            process.wait(15)
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
    """One run of a module's checks on some ranks."""

    def __init__(self, module: str, ranks: int, directory: Path) -> None:
        command = [sys.executable, str(HERE / "run_checks.py"), module, str(directory)]
        self.status, self.output = run_ranks(ranks, command)
        self.results: list[dict[str, str]] = []
        for rank in range(ranks):
            path = directory / f"{rank}.json"
            text = path.read_text(encoding="utf-8") if path.exists() else "{}"
            self.results.append(json.loads(text))

    def expect(self, check: str) -> None:
        """Fail unless the check passed on every rank."""
        for rank, results in enumerate(self.results):
            error = results.get(check)
            failed = [name for other in self.results for name, text in other.items() if text]
            if error is None and failed and check not in failed:
                pytest.fail(f"not run, since {failed[0]} failed before", pytrace=False)
            if error is None:
                pytest.fail(
                    f"not run on rank {rank}; the launch ended with {self.status}:\n"
                    f"{self.output[-4000:]}",
                    pytrace=False,
                )
            if error:
                pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)


@pytest.fixture(scope="session")
def launches(tmp_path_factory):
    """launches(module, ranks) -> Launch; each combination runs once."""
    done: dict[tuple[str, int], Launch] = {}

    def launch(module: str, ranks: int) -> Launch:
        key = (module, ranks)
        if key not in done:
            done[key] = Launch(module, ranks, tmp_path_factory.mktemp(f"{module}-{ranks}"))
        return done[key]

    return launch
