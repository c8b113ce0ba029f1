"""A program that a rank has started does not take the rank's place in the world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from perseusrun_command import perseusrun

from perseus.run.bootstrap import holder
from perseus.run.bootstrap.holder import HOLDER_VARIABLE
from perseus.run.bootstrap.identity import SINGLE, Identity

OURS = {
    "perseusrun": ("PERSEUS_RENDEZVOUS_ADDR", "PERSEUS_RENDEZVOUS_PORT"),
    "torch": ("MASTER_ADDR", "MASTER_PORT"),
}

RANK = """
import os, subprocess, sys
import numpy as np
import perseus.arrays as hvd

def child(*without):
    program = "import perseus.arrays as hvd; hvd.init(); print('size', hvd.size())"
    variables = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True
    )
    return (done.stdout + done.stderr).splitlines()[-1]

def sums():
    return hvd.allreduce(np.arange(3.0) * (hvd.rank() + 1), op=hvd.Sum).tolist()

hvd.init()
if hvd.rank() == 1:
    print("parent", os.getpid(), flush=True)
    print("inherits", child(), flush=True)
    names = [f"{prefix}_{name}" for prefix in ("PERSEUS", "HOROVOD") for name in ("RANK", "SIZE")]
    print("unset", child(*names), flush=True)
    if os.fork() == 0:
        try:
            hvd.shutdown()
            hvd.init()
        except Exception as error:
            print("fork", error, flush=True)
        os._exit(0)
    os.wait()
print("sums", sums(), flush=True)
hvd.shutdown()
print("left", sorted(name for name in os.environ if "HOLDER" in name), flush=True)
hvd.init()
print("sums", sums(), flush=True)
"""


def test_a_program_that_a_rank_has_started_is_told_which_process_is_the_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    done = perseusrun("-np", "2", sys.executable, str(tmp_path / "rank.py"))
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[1]<stdout>:") for line in done.stdout.splitlines()]
    said = dict(line.split(" ", 1) for line in lines if not line.startswith("[0]"))
    refusal = (
        f"[launch] process {said['parent']}, whose variables this one has inherited, is rank 1 of"
    )
    assert refusal in said["inherits"]
    assert refusal in said["fork"]
    assert said["unset"] == "size 1"
    assert said["left"] == "[]"
    assert done.stdout.count("sums [0.0, 3.0, 6.0]") == 4


@pytest.fixture(params=sorted(OURS))
def identity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Identity:
    monkeypatch.setenv(HOLDER_VARIABLE, "")
    for name, value in zip(OURS[request.param], ("127.0.0.1", "29511"), strict=True):
        monkeypatch.setenv(name, value)
    return Identity(1, 3, 1, 3, 0, 1, request.param)


def _held_by(process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv(HOLDER_VARIABLE, f"{holder._process(process.pid)} {rank}")


def test_a_process_may_join_again_and_so_may_one_that_it_becomes(identity: Identity) -> None:
    holder.hold(identity)
    assert os.environ[HOLDER_VARIABLE].startswith(f"{os.getpid()}.")
    holder.refuse_second(identity)  # as after os.execv(), which keeps number and start
    holder.release()
    assert HOLDER_VARIABLE not in os.environ


def test_only_a_living_process_with_the_same_rank_of_the_same_job_is_in_the_way(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold(identity)
    rank = os.environ[HOLDER_VARIABLE].partition(" ")[2]
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    try:
        _held_by(sleeper, monkeypatch, rank)
        with pytest.raises(ValueError, match=f"process {sleeper.pid}, .* is rank 1 of this job"):
            holder.refuse_second(identity)
        holder.release()  # another's: it stays
        with pytest.raises(ValueError, match="already"):
            holder.refuse_second(identity)
        holder.refuse_second(Identity(2, 3, 2, 3, 0, 1, identity.launcher))
        holder.refuse_second(SINGLE)
        with monkeypatch.context() as patch:
            patch.setenv(OURS[identity.launcher][1], "29512")
            holder.refuse_second(identity)
        later = os.environ[HOLDER_VARIABLE].replace(" ", "1 ", 1)  # with the same number
        with monkeypatch.context() as patch:
            patch.setenv(HOLDER_VARIABLE, later)
            holder.refuse_second(identity)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        holder.refuse_second(identity)  # a zombie
    finally:
        sleeper.kill()
        sleeper.communicate()
    holder.refuse_second(identity)


@pytest.mark.parametrize("value", ["", "x", "1", "-1.5 a", "99999999999.1 perseusrun"])
def test_a_value_of_others_says_nothing(
    value: str, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOLDER_VARIABLE, value)
    holder.refuse_second(identity)


def test_worlds_of_one_and_of_launchers_without_addresses_are_not_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HOLDER_VARIABLE, "")
    for each in (
        SINGLE,
        Identity(0, 1, 0, 1, 0, 1, "perseusrun"),
        Identity(0, 2, 0, 2, 0, 1, "slurm"),
    ):
        holder.hold(each)
        assert os.environ[HOLDER_VARIABLE] == ""
