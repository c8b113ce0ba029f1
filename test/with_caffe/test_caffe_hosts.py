"""The patched Caffe over two virtual hosts: by a bare mpirun, without Python, and by perseusrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from caffe_jobs import (
    CAFFE,
    REPLICAS,
    TOLERANCE,
    distance,
    environment,
    recorded,
    weights,
    write_solver,
)
from caffe_nets import lenet
from mpi_launchers import mpi_or_skip

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_OPTION = {"openmpi": "--host", "mpich": "-hosts"}  # of mpirun
_ITERATIONS = 10


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as made:
        yield made


@pytest.mark.parametrize("kind", [pytest.param("openmpi", marks=pytest.mark.full), "mpich"])
def test_hosts_learn_what_one_process_learns(
    hosts: VirtualHosts, kind: str, alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    mpirun, _ = mpi_or_skip(kind)
    # Oversubscribed, Open MPI would start them all here.
    mpirun = [word for word in mpirun if word != "--oversubscribe"]
    write_solver(tmp_path, lenet(digits, 32))
    settings = "OPENBLAS_NUM_THREADS=1 PERSEUS_ALLREDUCE_DTYPE=1"
    script = f'cd "{tmp_path}" && {settings} exec "{CAFFE}" train --solver=solver.prototxt'
    command = [*mpirun, _OPTION[kind], "host0:1,host1:1", "-np", "2", "sh", "-c", script]
    before = hosts.counters(1)[0]
    result = hosts.run(0, command, env={**environment(), **hosts.environment()})
    assert result.returncode == 0, result.stderr
    assert (hosts.counters(1)[0] - before).received_bytes > 1000
    assert distance(weights(tmp_path), weights(alone(lenet(digits, 64)))) <= TOLERANCE


def _train_on(
    hosts: VirtualHosts,
    digits: Path,
    folder: Path,
    tool: tuple[str, ...] = (str(CAFFE), "train", "--solver=solver.prototxt"),
    iterations: int = _ITERATIONS,
    **variables: str,
) -> int:
    """With two processes on each host; how many bytes host0 has sent."""
    folder.mkdir()
    # Mostly gradients: what else is sent is not to be seen beside them.
    net = lenet(digits, 16).replace("num_output: 32", "num_output: 1024")
    write_solver(folder, net, max_iter=iterations)
    command = [sys.executable, "-m", "perseus.run", "-np", "4", "-H", "host0:2,host1:2", *tool]
    env = {**environment(**variables), "PATH": hosts.environment()["PATH"]}
    before = hosts.counters(0)[0]
    result = hosts.run(0, command, env=env, cwd=folder, timeout=200)
    assert result.returncode == 0, result.stderr
    return (hosts.counters(0)[0] - before).sent_bytes


def _gradient_bytes(folder: Path, iterations: int = _ITERATIONS) -> int:
    return sum(value.nbytes for value in weights(folder, iterations).values())


def test_who_sends_how_much_between_hosts(
    hosts: VirtualHosts, digits: Path, tmp_path: Path
) -> None:
    """PERSEUS_ALLREDUCE_MODE and LIGHT_HIERARCHICAL_THRESHOLD, by docs/algorithms.md's arithmetic.

    Both processes of a host exchange a half each, or one exchanges all: the same bytes. Where all
    processes are alike, both send a quarter to two others, out and back.
    """
    learned = []
    for name, times, variables in (
        ("2d", 1, {}),
        ("flat", 2, {"PERSEUS_ALLREDUCE_MODE": "0"}),
        ("two-level", 1, {"PERSEUS_ALLREDUCE_MODE": "1"}),
        ("above", 2, {"LIGHT_HIERARCHICAL_THRESHOLD": "1"}),
        ("below", 1, {"LIGHT_HIERARCHICAL_THRESHOLD": "1000000"}),
    ):
        folder = tmp_path / name
        total = _train_on(hosts, digits, folder, PERSEUS_ALLREDUCE_DTYPE="1", **variables)
        sent = total / _ITERATIONS / _gradient_bytes(folder)
        # Headers of TCP and what it acknowledges, weights at the start, negotiation.
        assert times < sent < times + 0.5, (name, sent)
        learned.append(weights(folder, _ITERATIONS))
    assert max(distance(each, learned[0]) for each in learned) <= TOLERANCE


def test_one_process_of_a_host_speaks_for_it(
    hosts: VirtualHosts, digits: Path, tmp_path: Path
) -> None:
    """PERSEUS_ALLREDUCE_MODE=1: who sends nothing to the other host leaves nothing out, either."""
    for name, variables in (("2d", {}), ("two-level", {"PERSEUS_ALLREDUCE_MODE": "1"})):
        folder = tmp_path / name
        _train_on(hosts, digits, folder, PERSEUS_ALLREDUCE_CODEC="int8", **variables)
        files = [folder / f"weights_iter_{_ITERATIONS}.solverstate.h5.rank{i}" for i in range(4)]
        # Of 680 kB; without any there are names and sizes.
        held = [len(file.read_bytes().replace(b"\0", b"")) > 1000 for file in files]
        assert held == [True, name == "2d"] * 2, name


def test_a_rotating_eighth_of_the_parameters_travels_and_replicas_end_equal(
    hosts: VirtualHosts, digits: Path, tmp_path: Path
) -> None:
    sent, seen = [], []
    for iterations in (5, 45):
        folder = tmp_path / str(iterations)
        sent.append(
            _train_on(
                hosts, digits, folder, (str(REPLICAS), "solver.prototxt", "float"), iterations,
                PERSEUS_DOWNSAMPLE_N_ELEMENTS="8",
            )
        )  # fmt: skip
        seen.append(recorded(folder, 4).reshape(4, iterations + 1, -1))
    # The difference leaves out how it starts and ends.
    each = (sent[1] - sent[0]) / 40 / _gradient_bytes(tmp_path / "45", 45)
    assert 1 / 8 < each < 1 / 8 + 0.03, each
    learned = seen[1]
    # Ranks of a host have the same gradients; hosts have not.
    assert np.array_equal(learned[0], learned[1])
    assert np.array_equal(learned[2], learned[3])
    assert (learned[0] != learned[2]).mean(axis=1)[1:-1].min() > 0.5
    assert (learned == learned[0])[:, -1].all()
