"""Whole programs on real ranks: interruption, leaving, starting again, the examples."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import pytest
from ranks.launch import PARALLEL, run_ranks

pytest.importorskip("torch")

EXAMPLES = PARALLEL.parent.parent / "examples"


def _run(ranks: int, *command: object) -> str:
    status, output = run_ranks(ranks, [sys.executable, *map(str, command)])
    assert status == 0, output
    return output


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ctrl_c_ends_a_wait_and_not_the_operation(ranks):
    output = _run(ranks, PARALLEL / "programs" / "interrupted_synchronize.py")
    assert "interrupted after" in output
    for rank in range(ranks):
        assert f"rank {rank} finished" in output


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_shutdown_and_init_again_in_one_process(ranks):
    output = _run(ranks, PARALLEL / "programs" / "restart.py")
    assert output.count("finished") == ranks


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_rank_that_leaves_ends_the_others_waits(ranks):
    output = _run(ranks, PARALLEL / "programs" / "one_leaves.py")
    for rank in range(ranks):
        assert f"rank {rank} finished" in output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_demo_learns_digits(ranks, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    output = _run(ranks, EXAMPLES / "pytorch_mnist.py", "--plot", picture)
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= 0.97
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000


def _write_idx(path: Path, shape: tuple[int, ...], data: bytes) -> None:
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    path.write_bytes(header + data)


def test_the_demo_reads_mnist_files(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("tqdm")
    # Not digits, but as easy: the label says which of ten stripes is bright.
    for kind, count in (("train", 320), ("t10k", 80)):
        labels = torch.arange(count) % 10
        images = torch.randint(0, 60, (count, 28, 28), generator=torch.Generator().manual_seed(1))
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label + 4 : 2 * label + 6] = 255
        _write_idx(
            tmp_path / f"{kind}-images-idx3-ubyte",
            (count, 28, 28),
            images.to(torch.uint8).numpy().tobytes(),
        )
        _write_idx(
            tmp_path / f"{kind}-labels-idx1-ubyte",
            (count,),
            labels.to(torch.uint8).numpy().tobytes(),
        )
    arguments = ("--data-dir", tmp_path, "--epochs", "8", "--batch-size", "16")
    output = _run(2, EXAMPLES / "pytorch_mnist.py", *arguments)
    assert float(re.findall(r"test accuracy: (\d\.\d+)", output)[0]) >= 0.97


@pytest.mark.parametrize(
    ("example", "arguments", "ranks"),
    [
        # sharded_checks.py has its model.
        pytest.param("pytorch_sharded_classifier.py", ["--epochs", "4"], 2, marks=pytest.mark.full),
        ("pytorch_join.py", ["--epochs", "6"], 2),
    ],
)
def test_examples_learn_digits(example, arguments, ranks):
    pytest.importorskip("sklearn")
    output = _run(ranks, EXAMPLES / example, *arguments)
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output
    assert float(found[0]) >= 0.9
