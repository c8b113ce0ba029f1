"""What training ends with, codec by codec: digits with a CNN, text with a character model.

    perseusrun -np 2 python test/parallel/checks/convergence.py

prints the table of docs/algorithms.md. Every rank counts as a host of its own, so that gradients
are encoded between all.
"""

from __future__ import annotations

import functools
import os
import pydoc_data.topics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from patterns import world_with
from torch import nn
from torch.utils.data import TensorDataset

import perseus.torch.horovod as hvd

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

SEEDS = 3


@dataclass(frozen=True)
class Way:
    """How gradients travel, and by how much the loss of digits and text may be above exact ones'.

    That is above the worst of three exact seeds; docs/algorithms.md says why.
    """

    name: str
    above: tuple[float, float]
    compression: Callable[[], object] = lambda: hvd.Compression.settings
    dtype: int | None = None
    apart: bool = True

    def settings(self) -> dict[str, object]:
        """Of the world; with inner groups of one rank, all ranks are hosts of their own."""
        chosen: dict[str, object] = {"LIGHT_INTRA_SIZE": 1, "LIGHT_2D_ALLREDUCE": int(self.apart)}
        return chosen if self.dtype is None else {**chosen, "PERSEUS_ALLREDUCE_DTYPE": self.dtype}


# Seeds take their places by what the text is, and that changes a little with every Python.
WITHIN = (0.0, 0.002)
EXACT = Way("exact (PERSEUS_ALLREDUCE_DTYPE=1)", (0.0, 0.0), dtype=1)
LOSSY = [
    Way("float16 (default)", WITHIN),
    Way("the same, PERSEUS_ALLREDUCE_DTYPE=2", WITHIN, dtype=2),
    Way("float16 inside a host, too (PERSEUS_ALLREDUCE_DTYPE=0)", WITHIN, dtype=0, apart=False),
    Way("bfloat16", WITHIN, lambda: hvd.Compression.bf16),
    Way("int8", WITHIN, lambda: hvd.Compression.int8),
    Way("top-k 10 %", (0.0, 0.012), lambda: hvd.Compression.topk(0.1)),
    Way("top-k 1 %", (0.0, 0.05), lambda: hvd.Compression.topk(0.01)),
    Way("rotating 1/8", WITHIN, lambda: hvd.Compression.rotate(8)),
    # What it takes depends on the links of this machine; the least exact is top-k.
    Way("auto", (0.0, 0.05), lambda: hvd.Compression.auto),
]


@dataclass(frozen=True)
class Result:
    """Of the test set, after the last step."""

    loss: float
    accuracy: float


Workload = Callable[[Way, int], Result]


def _train(
    way: Way, model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], **options: float
) -> None:
    """A step of SGD with this rank's part of each batch; the learning rate falls to zero."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **options),
        named_parameters=model.named_parameters(),
        compression=way.compression(),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    hvd.synchronize_parameters()


@functools.cache
def digits(way: Way, seed: int) -> Result:
    """The CNN of examples/pytorch_mnist.py on the digits of scikit-learn; 264 steps of SGD."""
    from pytorch_mnist import Net, load_digits, test

    with world_with(**way.settings()):
        torch.manual_seed(seed)
        model = Net()
        train_set, test_set = load_digits()
        images, labels = train_set.tensors
        batches = []
        for _ in range(12):
            # The same on all ranks.
            shuffled = torch.randperm(len(labels))[hvd.rank() :: hvd.size()]
            batches += [(images[p], labels[p]) for p in shuffled.split(32) if len(p) == 32]
        _train(way, model, batches, lr=0.3)
        return Result(*test(model, test_set))


CONTEXT = 12


@functools.cache
def _windows() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of characters, to train and to test with; and how many different ones there are.

    The texts of Python's help() are part of every CPython's standard library.
    """
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    windows = numbers.unfold(0, CONTEXT + 1, 1)
    border = len(windows) * 9 // 10
    return windows[:border], windows[border + CONTEXT :: 7], len(letters)


@functools.cache
def text(way: Way, seed: int) -> Result:
    """The next character from 12 before it (Bengio et al. 2003); 400 steps of SGD with momentum."""
    from pytorch_mnist import test

    width, hidden = 16, 96
    with world_with(**way.settings()):
        torch.manual_seed(seed)
        training, testing, letters = _windows()
        model = nn.Sequential(
            nn.Embedding(letters, width),
            nn.Flatten(),
            nn.Linear(CONTEXT * width, hidden),
            nn.Tanh(),
            nn.Linear(hidden, letters),
        )
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        chosen = torch.randint(len(training), (400, 64), generator=generator)
        batches = [(training[i, :-1], training[i, -1]) for i in chosen]
        _train(way, model, batches, lr=0.05, momentum=0.9)
        return Result(*test(model, TensorDataset(testing[:, :-1], testing[:, -1])))


WORKLOADS: list[Workload] = [digits, text]


def limits(workload: Workload, way: Way) -> float:
    """The highest loss that training may end with on its way."""
    worst = max(workload(EXACT, seed).loss for seed in range(SEEDS))
    return worst + way.above[WORKLOADS.index(workload)]


def main() -> None:
    """Print the table."""
    os.environ["PERSEUS_LOG_LEVEL"] = "error"
    torch.set_num_threads(1)
    hvd.init()
    for way in [EXACT, *LOSSY]:
        row = f"| {way.name} |"
        for workload in WORKLOADS:
            found = [workload(way, seed) for seed in range(SEEDS)]
            row += " " + ", ".join(f"{result.loss:.3f}" for result in found) + " |"
            row += f" {100 * sum(result.accuracy for result in found) / SEEDS:.1f} % |"
        if hvd.rank() == 0:
            print(row, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
