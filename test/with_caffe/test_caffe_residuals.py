"""What lossy codecs hold back is in a file of each process beside the solver state."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import pytest
from caffe_jobs import train, write_solver
from caffe_nets import lenet

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
_STEPS = 15
# Files that are given to a training: of which iteration and rank. Then who misses one, for whom.
_LOST = {
    "top-k": ({}, 0, "what the processes held back"),
    "int8": ({0: (_STEPS, 0), 1: (2 * _STEPS, 1)}, 1, "what this process held back"),
}
_HEADER = 24  # bytes, with the number of the training


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


def _resume(begun: Path, folder: Path, period: Path, held: dict[int, Path], **codec: str) -> str:
    """Copies the state to `folder`, with files of what ranks held back, and goes on there."""
    folder.mkdir()
    _write(folder, period)
    for path in (_model(begun, _STEPS), _state(begun, _STEPS)):
        shutil.copy(path, folder)
    for rank, path in held.items():
        shutil.copy(path, _state(folder, _STEPS, rank))
    return train(folder, 2, f"--snapshot={_state(folder, _STEPS).name}", **_APART, **codec)


@pytest.mark.parametrize("name", _CODECS)
def test_a_resumed_training_goes_on_with_them(name: str, period: Path, tmp_path: Path) -> None:
    begun, resumed, lossy = (tmp_path / name for name in ("begun", "resumed", "lossy"))
    begun.mkdir()
    _write(begun, period)
    train(begun, 2, **_APART, **_CODECS[name])
    files = {rank: _state(begun, _STEPS, rank) for rank in range(2)}
    assert _held(begun, _STEPS) != _held(begun, 2 * _STEPS)
    assert _held(begun, _STEPS)[0] != _held(begun, _STEPS)[1]

    output = _resume(begun, resumed, period, files, **_CODECS[name])
    assert "held back" not in output, output
    final = 2 * _STEPS
    assert _model(resumed, final).read_bytes() == _model(begun, final).read_bytes()
    assert _state(resumed, final).read_bytes() == _state(begun, final).read_bytes()
    assert _held(resumed, final) == _held(begun, final)

    lost, who, said = _LOST[name]
    held = {rank: _state(begun, *place) for rank, place in lost.items()}
    output = _resume(begun, lossy, period, held, **_CODECS[name])
    (line,) = (line for line in output.splitlines() if "held back" in line)
    assert line.startswith(f"[{who}]"), line
    assert f"No file {_state(lossy, _STEPS, who).name} of" in line and said in line, line
    assert _model(lossy, final).read_bytes() != _model(begun, final).read_bytes()
