"""What lossy codecs hold back is in a file of each process beside the solver state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from caffe_jobs import train, weights, write_solver
from caffe_nets import lenet, linear_net
from numpy.typing import NDArray

# Every rank is a host of its own.
_APART = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}
_CODECS = {
    "top-k": {
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_RATIO": "0.1",
        "LIGHT_TOPK_THRESHOLD": "1",
        "PERSEUS_ALLREDUCE_DTYPE": "1",
    },
    "int8": {"PERSEUS_ALLREDUCE_CODEC": "int8"},
}
# Of these a training that is resumed sends first what it has loaded, so it is not bit-equal.
_POWERSGD = {"PERSEUS_ALLREDUCE_CODEC": "powersgd", "PERSEUS_POWERSGD_WARMUP_STEPS": "0"}
_SENT_FIRST = {
    "powersgd": _POWERSGD,
    "powersgd-warm-up": {**_POWERSGD, "PERSEUS_POWERSGD_WARMUP_STEPS": "5"},
    # Whether it holds something back itself depends on how fast links are.
    "auto": {"PERSEUS_ALLREDUCE_CODEC": "auto"},
}
_STEPS = 15
# Files that are given to a training: of which iteration and rank. Then who misses one, for whom.
_LOST = {
    "top-k": ({}, 0, "anything that the processes held back"),
    "int8": ({0: (_STEPS, 0), 1: (2 * _STEPS, 1)}, 1, "what this process held back"),
}
_HEADER = 32  # bytes, with the number of the training, behind a name and in front of the ranks


@pytest.fixture(scope="module")
def period(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many digits as two processes see until the snapshot: layers of Caffe begin anew then."""
    folder = tmp_path_factory.mktemp("period")
    with h5py.File(digits / "digits.h5") as every, h5py.File(folder / "digits.h5", "w") as first:
        for name in ("data", "label"):
            first[name] = every[name][: 2 * 32 * _STEPS]
    (folder / "digits.txt").write_text(f"{folder}/digits.h5\n")
    return folder


def _write(folder: Path, period: Path) -> None:
    write_solver(
        folder, lenet(period, 32), snapshot=_STEPS, max_iter=2 * _STEPS,
        snapshot_format="BINARYPROTO",
    )  # fmt: skip


def _state(folder: Path, steps: int, rank: int | None = None) -> Path:
    name = f"weights_iter_{steps}.solverstate"
    return folder / (name if rank is None else f"{name}.rank{rank}")


def _model(folder: Path, steps: int) -> Path:
    return folder / f"weights_iter_{steps}.caffemodel"


def _held(folder: Path, steps: int) -> list[bytes]:
    return [_state(folder, steps, rank).read_bytes()[_HEADER:] for rank in range(2)]


def _resume(
    begun: Path, folder: Path, period: Path, held: dict[int, Path], ranks: int = 2, **codec: str
) -> str:
    """Copies the state to `folder`, with files of what ranks held back, and goes on there."""
    folder.mkdir()
    _write(folder, period)
    for path in (_model(begun, _STEPS), _state(begun, _STEPS)):
        shutil.copy(path, folder)
    for rank, path in held.items():
        shutil.copy(path, _state(folder, _STEPS, rank))
    return train(folder, ranks, f"--snapshot={_state(folder, _STEPS).name}", **_APART, **codec)


@pytest.fixture(scope="module")
def begun(period: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """begun(name) -> the folder of a training with a codec of _CODECS or _SENT_FIRST."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("begun")
            _write(done[name], period)
            train(done[name], 2, **_APART, **{**_CODECS, **_SENT_FIRST}[name])
        return done[name]

    return run


def _files(begun: Path) -> dict[int, Path]:
    return {rank: _state(begun, _STEPS, rank) for rank in range(2)}


def _said(output: str) -> list[str]:
    return [line for line in output.splitlines() if "held back" in line]


@pytest.mark.parametrize("name", _CODECS)
def test_a_resumed_training_goes_on_with_them(
    name: str, begun: Callable[[str], Path], period: Path, tmp_path: Path
) -> None:
    source, resumed, lossy = begun(name), tmp_path / "resumed", tmp_path / "lossy"
    assert _held(source, _STEPS) != _held(source, 2 * _STEPS)
    assert _held(source, _STEPS)[0] != _held(source, _STEPS)[1]

    output = _resume(source, resumed, period, _files(source), **_CODECS[name])
    assert not _said(output), output
    final = 2 * _STEPS
    assert _model(resumed, final).read_bytes() == _model(source, final).read_bytes()
    assert _state(resumed, final).read_bytes() == _state(source, final).read_bytes()
    assert _held(resumed, final) == _held(source, final)

    lost, who, said = _LOST[name]
    held = {rank: _state(source, *place) for rank, place in lost.items()}
    (line,) = _said(_resume(source, lossy, period, held, **_CODECS[name]))
    assert line.startswith(f"[{who}]"), line
    assert f"No file {_state(lossy, _STEPS, who).name} of" in line and said in line, line
    assert _model(lossy, final).read_bytes() != _model(source, final).read_bytes()


@pytest.mark.parametrize("name", _SENT_FIRST)
def test_a_lost_file_is_told_where_nothing_is_held_back_at_first(
    name: str, begun: Callable[[str], Path], period: Path, tmp_path: Path
) -> None:
    source, codec = begun("powersgd" if name != "auto" else "int8"), _SENT_FIRST[name]
    files = _files(source)
    whole, lossy = tmp_path / "whole", tmp_path / "lossy"
    assert not _said(_resume(source, whole, period, files, **codec))

    (line,) = _said(_resume(source, lossy, period, {0: files[0]}, **codec))
    assert line.startswith("[1]"), line
    assert f"No file {_state(lossy, _STEPS, 1).name} of" in line, line
    assert "what this process held back" in line, line
    final = 2 * _STEPS
    assert _model(lossy, final).read_bytes() != _model(whole, final).read_bytes()

    if name != "auto":
        none = tmp_path / "none"
        (line,) = _said(_resume(source, none, period, {}, **codec))
        assert line.startswith("[0]"), line
        assert f"No file {_state(none, _STEPS, 0).name} of" in line, line
        assert "anything that the processes held back" in line, line


def test_ranks_that_a_state_did_not_have_miss_nothing(
    begun: Callable[[str], Path], period: Path, tmp_path: Path
) -> None:
    output = _resume(begun("int8"), tmp_path / "more", period, _files(begun("int8")), ranks=3,
                     **_CODECS["int8"])  # fmt: skip
    assert not _said(output), output


def test_files_without_the_number_of_ranks_are_read(
    begun: Callable[[str], Path], period: Path, tmp_path: Path
) -> None:
    source, held = begun("int8"), {}
    for rank, path in _files(source).items():
        content = path.read_bytes()
        held[rank] = tmp_path / f"old{rank}"
        held[rank].write_bytes(b"Perseus2" + content[8:24] + content[_HEADER:])
    resumed = tmp_path / "resumed"
    assert not _said(_resume(source, resumed, period, held, **_CODECS["int8"]))
    final = 2 * _STEPS
    assert _model(resumed, final).read_bytes() == _model(source, final).read_bytes()

    lossy = tmp_path / "lossy"
    (line,) = _said(_resume(source, lossy, period, {0: held[0]}, **_CODECS["int8"]))
    assert line.startswith("[1]") and "what this process held back" in line, line


_RATE = 0.125
_FALLS = 8  # steps at one learning rate
_COUNTS = {"wide/0": 21, "wide/1": 3, "narrow/0": 7, "shared/0": 14}


def _slopes(rows: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Gradients of linear_net for some inputs, by step; see there."""
    tiled = {"wide/0": np.tile(rows, 3), "narrow/0": rows, "shared/0": np.tile(2 * rows, 2)}
    return {**tiled, "wide/1": np.ones((len(rows), 3))}


def _numbers(path: Path) -> dict[str, NDArray[np.float64]]:
    """What a file holds, by name: what its rank sends later, and what it owns of results."""
    content, place, found = path.read_bytes(), _HEADER, {}
    while place < len(content):
        size = int(np.frombuffer(content, np.uint64, 1, place)[0])
        name = content[place + 8 : place + 8 + size].decode()
        place += 8 + size + 8 + 8 + 4  # behind the layout, the shapes and the factor
        count = int(np.frombuffer(content, np.uint64, 1, place)[0])
        data = np.frombuffer(content, np.float32, count, place + 8).astype(np.float64)
        found[name] = data.reshape(2, -1)
        place += 8 + 4 * count
    return found


@pytest.mark.parametrize("name", _CODECS)
@pytest.mark.parametrize("solver", ["SGD", "Nesterov"])
@pytest.mark.parametrize("policy", ["step", "multistep"])
def test_what_is_held_moves_weights_as_when_it_was_held(
    name: str, solver: str, policy: str, tmp_path: Path
) -> None:
    """Whatever the rate is when it arrives, and whatever factor a blob has."""
    steps, ranks = 20, 2
    index = np.arange(steps * ranks)[:, None]
    inputs = np.sin(index * 5 + np.arange(7) * 3 + index**2 / 7).astype(np.float32)
    with h5py.File(tmp_path / "inputs.h5", "w") as file:
        file["data"] = inputs
    (tmp_path / "inputs.txt").write_text(f"{tmp_path}/inputs.h5\n")
    falls = {
        "step": f"stepsize: {_FALLS}",
        "multistep": f"stepvalue: {_FALLS} stepvalue: {2 * _FALLS}",
    }
    net = linear_net(tmp_path / "inputs.txt").replace(
        'bottom: "data" top: "narrow"', 'bottom: "data" top: "narrow" param { lr_mult: 2 }'
    )
    write_solver(
        tmp_path, net, base_lr=_RATE, momentum=0, weight_decay=0, max_iter=steps, snapshot=steps,
        lr_policy=f'"{policy}" gamma: 0.5 {falls[policy]}', type=f'"{solver}"',
    )  # fmt: skip
    train(tmp_path, ranks, **_APART, **_CODECS[name])
    rates = _RATE * 0.5 ** (np.arange(steps) // _FALLS)
    state = tmp_path / f"weights_iter_{steps}.solverstate.h5"
    held = [_numbers(state.with_name(f"{state.name}.rank{i}")) for i in range(ranks)]
    learned = weights(tmp_path, steps)
    slopes = [_slopes(inputs[rank::ranks].astype(np.float64)) for rank in range(ranks)]
    worst = 0.0
    for blob, count in _COUNTS.items():
        factor = 2 if blob == "narrow/0" else 1
        moved = factor * np.mean([rates @ slope[blob] for slope in slopes], axis=0)
        own = np.mean([of_rank[blob][0] for of_rank in held], axis=0)
        results = np.sum([of_rank[blob][1] for of_rank in held], axis=0)
        waiting = factor * rates[-1] * (own + results)
        assert waiting.shape == (count,)
        left = -learned[blob].ravel() - moved
        np.testing.assert_allclose(left, -waiting, atol=2e-6)
        worst = max(worst, np.abs(left).max())
    assert worst > 1e-5
