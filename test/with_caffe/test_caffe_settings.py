"""What the variables about gradients do when the patched Caffe trains; see docs/config.md."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from caffe_jobs import (
    CAFFE,
    TOLERANCE,
    distance,
    finish,
    launched,
    start,
    train,
    weights,
    write_solver,
)
from caffe_nets import lenet

# Every rank is a host of its own: what goes between hosts goes between all.
APART = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}
EXACT = {**APART, "PERSEUS_ALLREDUCE_DTYPE": "1"}
TOP_K = {**EXACT, "LIGHT_TOPK_ALLREDUCE": "1", "LIGHT_TOPK_THRESHOLD": "1"}

SHAPES = {
    "flat": {
        "PERSEUS_ALLREDUCE_MODE": "0",
        "PERSEUS_ALLREDUCE_STREAMS": "1",
        "PERSEUS_ALLREDUCE_DTYPE": "1",
        "PERSEUS_OFFLINE_NEG": "1",
    },
    "tcp": {
        "PERSEUS_ALLREDUCE_FUSION": "8",
        "PERSEUS_ALLREDUCE_STREAMS": "12",
        "PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING": "1",
        "PERSEUS_GLOO_NETWORK_INTERFACE": "lo",
        "PERSEUS_TRANSPORT": "tcp",
        **EXACT,
    },
}
_BYTES = 10984  # of all gradients


@pytest.fixture(scope="module")
def one(alone: Callable[..., Path], digits: Path) -> dict[str, np.ndarray]:
    """What one process learns."""
    return weights(alone(lenet(digits, 64)))


def _apart_from(one: dict[str, np.ndarray], digits: Path, folder: Path, **variables: str) -> float:
    """How far two processes are from what one has learned."""
    write_solver(folder, lenet(digits, 32))
    train(folder, 2, **variables)
    return distance(weights(folder), one)


def _sent(folder: Path) -> list[dict[str, Any]]:
    """What rank 0's trace says of all that was averaged together, after the first iteration."""
    trace = json.loads((folder / "trace.json").read_text())
    sent = [event["args"] for event in trace if event["name"].startswith("bucket")]
    begins = [i for i, args in enumerate(sent) if args["tensors"] == ["action"]]
    return sent[begins[1] :]


def _largest_fused(sent: list[dict[str, Any]]) -> int:
    """Bytes; a gradient alone may be larger."""
    return max((args["bytes"] for args in sent if len(args["tensors"]) > 1), default=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_of_the_allreduce_is_not_seen_in_weights(
    shape: str, one: dict[str, np.ndarray], digits: Path, tmp_path: Path
) -> None:
    variables = {**SHAPES[shape], "HOROVOD_TIMELINE": "trace.json"}
    assert _apart_from(one, digits, tmp_path, **variables) <= TOLERANCE
    sent = _sent(tmp_path)
    streams = int(variables["PERSEUS_ALLREDUCE_STREAMS"])
    assert {args["stream"] for args in sent} == set(range(streams))
    assert {args["transport"] for args in sent} == {variables.get("PERSEUS_TRANSPORT", "shm")}
    if "PERSEUS_ALLREDUCE_FUSION" in variables:
        assert _largest_fused(sent) <= _BYTES / int(variables["PERSEUS_ALLREDUCE_FUSION"])


def test_a_training_becomes_silent_and_takes_other_names_of_settings(
    digits: Path, tmp_path: Path
) -> None:
    """PERSEUS_OFFLINE_NEG: nothing is negotiated in most of the iterations."""
    write_solver(tmp_path, lenet(digits, 16), max_iter=200)
    output = train(
        tmp_path, 2, HOROVOD_TIMELINE="trace.json", HOROVOD_TIMELINE_MARK_CYCLES="1",
        PERSEUS_OFFLINE_NEG="1", PERSEUS_NCCL_ENABLE="1", PERSEUS_ALLREDUCE_DTYPE="1",
        TIACC_TRAINING_NUM_NCCL_STREAMS="2", TIACC_TRAINING_FUSION_THRESHOLD="512",
    )  # fmt: skip
    rounds = [0]  # of negotiation, in each iteration
    for event in json.loads((tmp_path / "trace.json").read_text()):
        rounds[-1] += event["name"] == "CYCLE_START"
        if event.get("args", {}).get("tensors") == ["action"]:
            rounds.append(0)
    assert rounds.count(0) > 20, rounds
    sent = _sent(tmp_path)
    assert {args["stream"] for args in sent} == {0, 1}
    assert _largest_fused(sent) <= 512
    assert output.count("[config] PERSEUS_NCCL_ENABLE=1 alone changes nothing") == 1


def test_the_stream_tuner_can_be_switched_off(digits: Path, tmp_path: Path) -> None:
    """PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING: which numbers of streams were tried."""
    tried = []
    for disabled in ("0", "1"):
        folder = tmp_path / disabled
        folder.mkdir()
        write_solver(folder, lenet(digits, 16), max_iter=60)
        train(
            folder, 2, HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG="tuner.csv",
            PERSEUS_TRANSPORT="tcp", PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING=disabled,
        )  # fmt: skip
        with (folder / "tuner.csv").open(newline="") as log:
            tried.append({row["streams"] for row in csv.DictReader(log)})
    assert len(tried[0]) > 1, tried
    assert tried[1] == {"4"}, tried


LOSSY = {
    # Half precision: numbers of about 0.1 lose digits after the fourth.
    "float16": (1e-6, 1e-2, {"PERSEUS_ALLREDUCE_DTYPE": "0"}),
    "float16-scaled": (1e-6, 1e-2, {**APART, "PERSEUS_ALLREDUCE_GRADIENT_SCALE": "8"}),
    "mixed": (1e-6, 1e-2, {**APART, "PERSEUS_ALLREDUCE_DTYPE": "2"}),
    # Replicas are averaged a half at a time.
    "rotating": (1e-3, 0.7, {**EXACT, "PERSEUS_DOWNSAMPLE_N_ELEMENTS": "2"}),
    # What is held back comes later.
    "top-k": (1e-3, 1.0, {**TOP_K, "LIGHT_TOPK_RATIO": "0.1"}),
    # Of gradients with shapes, which are matrices.
    "powersgd": (
        1e-3,
        1.0,
        {
            **EXACT,
            "PERSEUS_ALLREDUCE_CODEC": "powersgd",
            "PERSEUS_POWERSGD_WARMUP_STEPS": "0",
        },
    ),
    # All elements, so that nothing is changed but how they travel.
    "top-k-whole": (-1.0, TOLERANCE, {**TOP_K, "LIGHT_TOPK_RATIO": "1"}),
    "top-k-float16": (
        1e-6,
        1e-2,
        {**TOP_K, "LIGHT_TOPK_RATIO": "1", "LIGHT_TOPK_FP16": "1"},
    ),
}
_SHORT = {"float16", "powersgd", "rotating", "top-k-float16"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _SHORT else [pytest.mark.full]) for name in LOSSY],
)
def test_lossy_codecs_change_a_little(
    name: str, one: dict[str, np.ndarray], digits: Path, tmp_path: Path
) -> None:
    least, most, variables = LOSSY[name]
    assert least < _apart_from(one, digits, tmp_path, **variables) < most


def test_accumulation_is_one_larger_batch(
    one: dict[str, np.ndarray], digits: Path, tmp_path: Path
) -> None:
    """Of two steps with half as much each; iterations without an update count, too."""
    write_solver(
        tmp_path, lenet(digits, 16), max_iter=60, base_lr=0.025, weight_decay=0.001, display=1
    )
    output = train(tmp_path, 2, PERSEUS_ACCUMULATE_N_STEPS="2", HOROVOD_TIMELINE="trace.json")
    assert distance(weights(tmp_path, 60), one) <= TOLERANCE
    assert output.count(", lr = ") == 30, "of the updates"
    assert '"conv1/0"' in json.dumps(json.loads((tmp_path / "trace.json").read_text()))


def _with_nan(digits: Path, folder: Path) -> None:
    """A net whose second digit, rank 1's first, is not a number."""
    with h5py.File(digits / "digits.h5") as file:
        data, label = file["data"][()], file["label"][()]
    data[1] = np.nan
    with h5py.File(folder / "digits.h5", "w") as file:
        file["data"], file["label"] = data, label
    (folder / "digits.txt").write_text(f"{folder}/digits.h5\n")
    write_solver(folder, lenet(folder, 32).replace("pool: MAX", "pool: AVE"), max_iter=5)


@pytest.mark.parametrize("action", ["report", "skip", "raise"])
def test_a_nan_is_reported_with_tensor_and_rank(action: str, digits: Path, tmp_path: Path) -> None:
    _with_nan(digits, tmp_path)
    # The first name is misspelt, as it once was.
    check = "PERSEUS_ALLREDUCE_NANHECK" if action == "skip" else "PERSEUS_ALLREDUCE_NANCHECK"
    checks = {check: "1", "PERSEUS_ALLREDUCE_NANCHECK_ACTION": action}
    command = [*launched(2), str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(tmp_path, command, **checks))
    assert re.search(r"NaN in the gradient of (conv1|ip1|ip2)/[01] on rank 1", output), output
    assert (status == 0) == (action != "raise"), output
    if action != "raise":
        finite = all(np.isfinite(value).all() for value in weights(tmp_path, 5).values())
        assert finite == (action == "skip")


def test_slow_ranks_are_named(digits: Path, tmp_path: Path) -> None:
    """Rank 1's batches are larger."""
    for rank, batch in ((0, 16), (1, 1024)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        write_solver(folder, lenet(digits, batch), max_iter=12)
    script = f'cd $PERSEUS_RANK; exec "{CAFFE}" train --solver=solver.prototxt'
    command = [*launched(2), "sh", "-c", script]
    status, output = finish(start(tmp_path, command, PERSEUS_PERF_CHECK_N_STEPS="5"))
    assert status == 0, output
    lines = [line for line in output.splitlines() if "[perf check] slow" in line]
    assert lines, output
    assert all(" rank 1 " in line.partition("for each:")[2] for line in lines), lines


def _in_folders(folder: Path, digits: Path, **solver: tuple[object, object]) -> list[str]:
    """A command that trains with a solver of its own on each of two ranks, which share a net."""
    for rank in (0, 1):
        own = folder / str(rank)
        own.mkdir()
        mine = {name: values[rank] for name, values in solver.items()}
        write_solver(own, lenet(digits, 32), max_iter=5, **mine)
    script = f'cd $PERSEUS_RANK; exec "{CAFFE}" train --solver=solver.prototxt'
    return [*launched(2), "sh", "-c", script]


def test_parameters_that_differ_are_an_error_that_names_the_first(
    digits: Path, tmp_path: Path
) -> None:
    """Rank 1 learns faster: all of its parameters are others after the first update."""
    command = _in_folders(tmp_path, digits, base_lr=(0.05, 0.051))
    status, output = finish(start(tmp_path, command, PERSEUS_PARAMETER_CHECK_N_STEPS="3"))
    assert status != 0
    found = re.search(
        r"after 3 steps the parameter conv1/0 is not the same on all ranks "
        r"\(hash \w{16} on rank \d, hash \w{16} on rank \d\); of 6 parameters 6 differ",
        output,
    )
    assert found, output


def test_parameters_that_are_equal_pass_the_comparison(digits: Path, tmp_path: Path) -> None:
    command = _in_folders(tmp_path, digits)
    variables = {"PERSEUS_PARAMETER_CHECK_N_STEPS": "2", "HOROVOD_TIMELINE": "trace.json"}
    status, output = finish(start(tmp_path, command, **variables))
    assert status == 0, output
    trace = json.loads((tmp_path / "0" / "trace.json").read_text())
    buckets = [event["args"]["tensors"] for event in trace if event["name"].startswith("bucket")]
    # Behind the second and the fourth of five iterations.
    assert sum("compare/1" in tensors for tensors in buckets) == 2
