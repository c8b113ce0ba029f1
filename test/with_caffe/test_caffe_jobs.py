"""How jobs of the patched Caffe end: signals, dead processes, what is wrong from the start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from caffe_jobs import CAFFE, finish, launched, start, train, weights, write_solver
from caffe_nets import lenet

_TRAIN = f'"{CAFFE}" train --solver=solver.prototxt'
# Every process leaves its id behind.
_WITH_IDS = f"echo $$ > id$PERSEUS_RANK; exec {_TRAIN}"
# The launcher learns of rank 1's end later than rank 0 does.
_DYING = (
    f"{_TRAIN} & echo $! > id$PERSEUS_RANK; wait $!; code=$?; touch ended$PERSEUS_RANK; "
    "while [ ! -e ended0 ]; do sleep 0.1; done; sleep ${PERSEUS_RANK}0; exit $code"
)
_FOR_EVER = {"max_iter": 100_000_000, "display": 1}


def _start(directory: Path, digits: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    """A job that trains for ever, when it has begun to."""
    write_solver(directory, lenet(digits, 16), **_FOR_EVER)
    job = start(directory, [*launched(2), "sh", "-c", script], **variables)
    assert job.stdout is not None
    for line in job.stdout:
        if "Iteration 3 (" in line:
            return job
    raise AssertionError(f"ended with {job.wait()}")


def _signal(directory: Path, rank: int, number: int) -> None:
    os.kill(int((directory / f"id{rank}").read_text()), number)


def test_a_signal_to_one_process_is_followed_by_all(digits: Path, tmp_path: Path) -> None:
    job = _start(tmp_path, digits, _WITH_IDS)
    _signal(tmp_path, 1, signal.SIGHUP)  # take a snapshot
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.solverstate.h5")):
        assert time.monotonic() < deadline, "no snapshot"
        time.sleep(0.01)
    assert job.poll() is None
    _signal(tmp_path, 1, signal.SIGINT)  # stop
    status, output = finish(job)
    assert status == 0, output
    assert "Optimization stopped early" in output, output
    states = [path.name for path in tmp_path.glob("*.solverstate.h5")]
    iterations = [int(name.removesuffix(".solverstate.h5").split("_")[-1]) for name in states]
    assert len(iterations) == 2, states
    assert weights(tmp_path, max(iterations))


@pytest.mark.parametrize("parts", ["1", "4"])
def test_a_killed_process_ends_the_others_with_one_line(
    parts: str, digits: Path, tmp_path: Path
) -> None:
    rotation = {"PERSEUS_DOWNSAMPLE_N_ELEMENTS": parts}
    apart = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}
    job = _start(tmp_path, digits, _DYING, **apart, **rotation)
    _signal(tmp_path, 1, signal.SIGKILL)
    status, output = finish(job)
    assert status != 0
    errors = re.findall(r"^\[0\].*?[ :>]([EF]\d.*)", output, re.MULTILINE)
    assert len(errors) == 1, output
    assert "lost rank 1" in errors[0], output
    assert "stack trace" not in output, output
    assert "rank 0 on localhost was the first to fail, with exit code 1" in output, output


def test_a_process_without_its_solver_ends_the_others(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16), name="solver0.prototxt", **_FOR_EVER)
    script = f'exec "{CAFFE}" train --solver=solver$PERSEUS_RANK.prototxt'
    status, output = finish(start(tmp_path, [*launched(2), "sh", "-c", script]))
    assert status != 0
    assert "File not found: solver1.prototxt" in output, output


def test_nets_that_differ_are_refused_by_name(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16), **_FOR_EVER)
    other = tmp_path / "other"
    other.mkdir()
    write_solver(other, lenet(digits, 16).replace("num_output: 32", "num_output: 31"), **_FOR_EVER)
    script = f'[ $PERSEUS_RANK = 0 ] || cd other; exec "{CAFFE}" train --solver=solver.prototxt'
    status, output = finish(start(tmp_path, [*launched(2), "sh", "-c", script]))
    assert status != 0
    assert "weights/2" in output, output


def test_a_wrong_variable_is_one_line(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16))
    command = [str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(tmp_path, command, PERSEUS_ALLREDUCE_STREAMS="99"))
    assert status == 1
    assert len(output.splitlines()) == 1, output
    assert "PERSEUS_ALLREDUCE_STREAMS='99'" in output, output


def test_an_elastic_job_is_refused(digits: Path, tmp_path: Path) -> None:
    """Its processes have no place in a world: each would train alone."""
    write_solver(tmp_path, lenet(digits, 16), max_iter=2)
    command = [*launched(2), "--min-np", "1", str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(tmp_path, command))
    assert status != 0, output
    assert "HOROVOD_ELASTIC='1': perseusrun has started an elastic job" in output, output
    assert not list(tmp_path.glob("weights_iter_*")), output


def test_an_interface_that_is_not_there_is_named(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16))
    command = [*launched(2), str(CAFFE), "train", "--solver=solver.prototxt"]
    settings = {"PERSEUS_TRANSPORT": "tcp", "PERSEUS_NCCL_NETWORK_INTERFACE": "nope0"}
    status, output = finish(start(tmp_path, command, **settings))
    assert status != 0
    assert "names 'nope0', which does not exist" in output, output


def test_processes_that_know_their_place_meet_at_the_port(digits: Path, tmp_path: Path) -> None:
    """torchrun's variables set by hand; PERSEUS_MASTER_PORT is where rank 0 listens."""
    write_solver(tmp_path, lenet(digits, 16), max_iter=2)
    command = [str(CAFFE), "train", "--solver=solver.prototxt"]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    secret = "0123456789abcdef0123456789abcdef"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        known = {**world, "PERSEUS_SECRET": secret, "PERSEUS_MASTER_PORT": port}
        status, output = finish(start(tmp_path, command, RANK="0", LOCAL_RANK="0", **known))
        assert status != 0
        assert f"port {port} is taken: set PERSEUS_MASTER_PORT" in output, output
    jobs = [start(tmp_path, command, RANK=rank, LOCAL_RANK=rank, **known) for rank in ("0", "1")]
    for status, output in map(finish, jobs):
        assert status == 0, output
    assert weights(tmp_path, 2)


def test_a_world_of_one_by_a_launcher(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16), max_iter=2)
    assert "Training with Perseus, processes: 1" in train(tmp_path, 1)
