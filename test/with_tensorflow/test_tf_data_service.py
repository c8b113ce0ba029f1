"""A job of compute workers serves datasets to a job that trains."""

from __future__ import annotations

import json
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytest.importorskip("tensorflow")

PROGRAM = str(Path(__file__).resolve().parent / "data_service_rank.py")

WORKER = [sys.executable, "-m", "perseus.tensorflow.data.compute_worker"]
EVERYTHING = [3 * x + 1 for x in range(1001)]


@pytest.mark.parametrize(
    ("dispatchers", "side", "own"),
    [
        (1, "compute", "shared"),
        pytest.param(1, "compute", "own", marks=pytest.mark.full),
        pytest.param(1, "training", "own", marks=pytest.mark.full),
        # Workers whose dispatchers ended with the training stop when TensorFlow gives these up.
        pytest.param(2, "training", "own", marks=pytest.mark.full),
        pytest.param(2, "compute", "own", marks=pytest.mark.full),
    ],
)
def test_every_element_is_there(run_ranks, tmp_path, dispatchers, side, own):
    config, out = tmp_path / "compute.json", tmp_path / "found"
    serve = [*WORKER, str(config), f"--dispatchers={dispatchers}", f"--dispatcher-side={side}"]
    with ThreadPoolExecutor(1) as jobs:
        serving = jobs.submit(run_ranks, 2, serve)
        status, output = run_ranks(2, [sys.executable, PROGRAM, str(config), side, own, str(out)])
        assert status == 0, output
        status, output = serving.result()
    assert status == 0, output
    found = [list(map(int, Path(f"{out}.{rank}").read_text().split())) for rank in (0, 1)]
    if own == "shared":
        assert sorted(found[0] + found[1]) == EVERYTHING
    else:
        assert found == [EVERYTHING, EVERYTHING]
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert len(bytes.fromhex(json.loads(config.read_text())["key"])) == 32


@pytest.mark.full
@pytest.mark.parametrize("side", ["compute", "training"])
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_every_element_reaches_other_hosts(tmp_path, side):
    """A dispatcher and a worker on each of two hosts, who all reach both."""
    config, out = tmp_path / "compute.json", tmp_path / "found"
    launch = ["-m", "perseus.run", "-np", "2", "-H", "host0:1,host1:1"]
    over = [sys.executable, *launch, sys.executable]
    worker = [*WORKER[1:], str(config), "--dispatchers=2", f"--dispatcher-side={side}"]
    with VirtualHosts(2) as hosts, ThreadPoolExecutor(2) as jobs:
        env = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
        commands = [[*over, *worker], [*over, PROGRAM, str(config), side, "own", str(out)]]
        runs = [jobs.submit(hosts.run, 0, c, env=env, timeout=200) for c in commands]
        for run in [job.result() for job in runs]:
            assert run.returncode == 0, run.stdout + run.stderr
    for rank in (0, 1):
        assert list(map(int, Path(f"{out}.{rank}").read_text().split())) == EVERYTHING


HOROVODS = ["-m", "perseus.compat.horovod", "-m", "horovod.tensorflow.data.compute_worker"]


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(WORKER, id="perseus", marks=pytest.mark.full),
        pytest.param([sys.executable, *HOROVODS], id="horovod"),
    ],
)
def test_dispatchers_that_do_not_divide_the_ranks_are_an_error(run_ranks, tmp_path, worker):
    status, output = run_ranks(2, [*worker, str(tmp_path / "compute.json"), "--dispatchers=3"])
    assert status == 1
    assert "Number of processes (2) must be a multiple of number of dispatchers (3)." in output


@pytest.mark.full
def test_horovods_name_runs_it(run_ranks):
    status, output = run_ranks(1, [sys.executable, *HOROVODS, "--help"])
    assert status == 0
    assert "--dispatcher-side {compute,training}" in output
