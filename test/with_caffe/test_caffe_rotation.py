"""PERSEUS_DOWNSAMPLE_N_ELEMENTS: a rotating part of the parameters is averaged, not gradients."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from caffe_jobs import (
    CAFFE,
    distance,
    finish,
    launched,
    replicas,
    start,
    train,
    weights,
    write_solver,
)
from caffe_nets import accuracy_layer, lenet, linear_net
from numpy.typing import NDArray

_PARTS = "PERSEUS_DOWNSAMPLE_N_ELEMENTS"
# Every rank is a host of its own.
_APART = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}
_RATE = 0.125
_INPUTS = 7
# Of linear_net: what is learned, and one that is not. The layer "shared" is there twice.
_COUNTS = {"wide/0": 3 * _INPUTS, "wide/1": 3, "narrow/0": _INPUTS, "shared/0": 2 * _INPUTS}
_FROZEN = 2 * _INPUTS


@dataclass(frozen=True)
class _Case:
    """inside: ranks of a host. equal: after which steps the replicas are equal, besides the end."""

    ranks: int = 2
    inside: int = 1
    parts: int = 2
    steps: int = 9
    dtype: str = "float"
    passes: int = 1
    sums: int = 1  # PERSEUS_ACCUMULATE_N_STEPS
    skipped: int = -1  # a step in which rank 1 has a NaN
    solver: dict[str, object] = field(default_factory=dict)
    wish: str = ""  # for the tool
    equal: tuple[int, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    rounded: bool = False  # the average of a host's gradients is no short binary fraction


_CASES = {
    "half": _Case(),
    "eighth-of-doubles": _Case(parts=8, steps=17, dtype="double"),
    "more-parts-than-elements": _Case(parts=30, steps=32),
    "hosts-of-two": _Case(ranks=4, inside=2, parts=3, passes=2),
    "hosts-of-three-and-one": _Case(ranks=4, inside=3, dtype="double", rounded=True),
    "snapshots": _Case(solver={"snapshot": 4}, equal=(4, 8)),
    "tests": _Case(parts=3, solver={"test_interval": 3, "test_iter": 1}, equal=(3, 6)),
    "a-signal": _Case(parts=4, wish="1:4:snapshot", equal=(5,)),
    "a-stop": _Case(parts=4, steps=6, solver={"max_iter": 20}, wish="1:5:stop"),
    "sums": _Case(sums=2, steps=11, solver={"snapshot": 5}, equal=(5, 10)),
    "skipped": _Case(
        skipped=3,
        variables={
            "PERSEUS_ALLREDUCE_NANCHECK": "1",
            "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip",
        },
    ),
    "schedule": _Case(parts=4, steps=60, variables={"PERSEUS_OFFLINE_NEG": "1"}),
    # What is held back has a momentum, but nothing is.
    "momentum": _Case(variables={"PERSEUS_GRADIENT_MOMENTUM": "0.5"}),
    "half-precision": _Case(ranks=4, inside=2, variables={"PERSEUS_ALLREDUCE_DTYPE": "0"}),
    # All ranks are alike.
    "flat-tcp": _Case(
        ranks=4,
        variables={
            "PERSEUS_TRANSPORT": "tcp",
            "LIGHT_2D_ALLREDUCE": "auto",
            "PERSEUS_ALLREDUCE_MODE": "0",
            "PERSEUS_ALLREDUCE_STREAMS": "4",
        },
    ),
}


def _inputs(case: _Case) -> NDArray[np.float32]:
    rows = np.arange(case.steps * case.passes * case.ranks)[:, None]
    values = ((rows * 5 + np.arange(_INPUTS) * 3 + rows // 7) % 8).astype(np.float32)
    if case.skipped >= 0:
        values[case.skipped * case.passes * case.ranks + 1, 2] = np.nan
    return values


def _slope(case: _Case, rank: int, step: int) -> NDArray[np.float64]:
    """Of the sum of all outputs; process i reads every n-th row."""
    first = step * case.passes
    rows = _inputs(case)[rank :: case.ranks][first : first + case.passes].astype(np.float64)
    row = rows.mean(axis=0)
    return np.concatenate([np.tile(row, 3), np.ones(3), row, np.tile(2 * row, 2)])


def _rows(case: _Case, part: int) -> NDArray[np.bool_]:
    """Which elements of all parameters belong to a part."""
    chosen = []
    for count in _COUNTS.values():
        index = np.arange(count)
        begin, end = count * part // case.parts, count * (part + 1) // case.parts
        chosen.append((begin <= index) & (index < end))
    return np.concatenate(chosen)


def _simulate(case: _Case) -> NDArray[np.float64]:
    """Of each rank, what it has at the beginning of each step and at the end."""
    count = sum(_COUNTS.values())
    now = np.zeros((case.ranks, count))
    under_way, summed = np.zeros_like(now), np.zeros_like(now)
    seen, turn = [now.copy()], 0
    for step in range(case.steps):
        own = np.stack([_slope(case, rank, step) for rank in range(case.ranks)])
        for begin in range(0, case.ranks, case.inside):
            host = slice(begin, begin + case.inside)
            own[host] = own[host].mean(axis=0)
        summed += own
        is_last = (step + 1) % case.sums == 0
        applies = is_last and step != case.skipped
        if applies:
            now -= _RATE * summed
        if is_last:
            summed[:] = 0
        if step + 1 in (*case.equal, case.steps):
            now[:] = (now + under_way).mean(axis=0)
            under_way[:] = 0
        elif applies:  # another part of what the step has made
            rows, turn = _rows(case, turn), (turn + 1) % case.parts
            sent = np.where(rows, now.mean(axis=0) - now, 0)
            now += under_way
            under_way = sent
        seen.append(now.copy())
    return np.stack(seen, axis=1)


def _write(case: _Case, folder: Path) -> None:
    with h5py.File(folder / "inputs.h5", "w") as file:
        file["data"] = _inputs(case)
    (folder / "inputs.txt").write_text(f"{folder}/inputs.h5\n")
    write_solver(
        folder, linear_net(folder / "inputs.txt"),
        **{
            "base_lr": _RATE, "momentum": 0, "weight_decay": 0, "iter_size": case.passes,
            "max_iter": case.steps, **case.solver,
        },
    )  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_replicas_are_those_of_a_simulation(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    _write(case, tmp_path)
    variables = {**_APART, "LIGHT_INTRA_SIZE": str(case.inside), **case.variables}
    variables[_PARTS] = str(case.parts)
    variables["PERSEUS_ACCUMULATE_N_STEPS"] = str(case.sums)
    flat = replicas(tmp_path, case.ranks, case.dtype, case.wish, **variables)
    seen = flat.reshape(case.ranks, case.steps + 1, sum(_COUNTS.values()) + _FROZEN)
    learned, frozen = seen[..., :-_FROZEN], seen[..., -_FROZEN:]
    assert (frozen == 0.5).all()
    expected = _simulate(case)
    assert np.abs(learned - expected).max() <= (1e-12 if case.rounded else 0)
    together = {*case.equal, case.steps}
    equal = {step for step in range(1, case.steps + 1) if (seen[:, step] == seen[0, step]).all()}
    assert equal >= together
    assert len(equal) < case.steps / 2, equal
    saved = {int(path.name.split("_")[2].split(".")[0]) for path in tmp_path.glob("*model.h5")}
    assert saved == (together if "test_iter" not in case.solver else {case.steps})
    for step in saved:
        assert np.array_equal(weights(tmp_path, step)["wide/0"].ravel(), seen[0, step, :21])


def test_a_resumed_training_goes_on_from_the_average(tmp_path: Path) -> None:
    """It reads the same inputs once more: each weight moves as far as before."""
    case = _Case(ranks=4, parts=3, steps=8, solver={"snapshot": 8})
    settings = {**_APART, _PARTS: "3"}
    _write(case, tmp_path)
    train(tmp_path, 4, **settings)
    _write(replace(case, solver={"max_iter": 16}), tmp_path)
    output = train(tmp_path, 4, "--snapshot=weights_iter_8.solverstate.h5", **settings)
    assert "held back" not in output, output
    first, second = weights(tmp_path, 8), weights(tmp_path, 16)
    moved = [name for name in first if name != "frozen/0"]
    assert all(np.array_equal(second[name], 2 * first[name]) for name in moved)
    assert np.ptp(first["wide/0"]) > 0


def test_training_learns_as_well_as_with_exact_averages(digits: Path, tmp_path: Path) -> None:
    """On average over first weights: a single loss is a third off as often as not."""
    losses: dict[int, list[float]] = {1: [], 2: [], 8: []}
    for parts, found in losses.items():
        for seed in range(4):
            folder = tmp_path / f"{parts}.{seed}"
            folder.mkdir()
            write_solver(
                folder, lenet(digits, 16) + accuracy_layer("ip2"), max_iter=200, random_seed=seed,
                test_interval=200, test_iter=1797 // 16, test_initialization="false",
            )  # fmt: skip
            output = train(
                folder, 4, **_APART, **{_PARTS: str(parts), "PERSEUS_ALLREDUCE_DTYPE": "1"}
            )
            accuracy = float(re.findall(r"Test net output #0: accuracy = (\S+)", output)[0])
            assert accuracy > 0.95
            found.append(float(re.findall(r"Test net output #1: loss = (\S+)", output)[0]))
    exact = np.mean(losses.pop(1))
    assert exact < 0.1
    assert all(np.mean(found) < 1.2 * exact for found in losses.values()), (exact, losses)


def test_one_host_averages_gradients_as_ever(digits: Path, tmp_path: Path) -> None:
    learned = []
    for parts in ("1", "4"):
        folder = tmp_path / parts
        folder.mkdir()
        write_solver(folder, lenet(digits, 32), snapshot=15)
        train(folder, 2, HOROVOD_TIMELINE="trace.json", **{_PARTS: parts})
        learned.append(weights(folder))
        trace = (folder / "trace.json").read_text()
        assert '"conv1/0"' in trace
        assert '"rotate.0"' not in trace
    assert distance(*learned) == 0


def test_a_comparison_of_parameters_is_refused(digits: Path, tmp_path: Path) -> None:
    write_solver(tmp_path, lenet(digits, 16), max_iter=2)
    settings = {_PARTS: "4", "PERSEUS_PARAMETER_CHECK_N_STEPS": "5"}
    command = [*launched(2), str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(tmp_path, command, **settings))
    assert status != 0
    assert "PERSEUS_PARAMETER_CHECK_N_STEPS cannot compare them: unset it, or " in output, output
    # One process has nothing to differ from.
    train(tmp_path, 1, **settings)
