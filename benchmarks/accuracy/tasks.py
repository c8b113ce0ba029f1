"""The trainings that judge codecs: digits (CNN), text (transformer), and denoising (autoencoder).

Everything about a run follows from its seed: the first weights, and which examples each rank sees.
Pure but for torch's global generator, which sets the first weights.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(ABC):
    """A model, its data and what is measured on the test set.

    score: the name of what evaluate returns, of which more is better. margin: what counts as no
        loss of it; relative = as a part of the exact runs' mean. rates: the tuned learning rates of
        exact training with 2 ranks, by optimizer.
    """

    name: str
    score: str
    margin: float
    relative: bool
    batch: int
    steps: int
    rates: ClassVar[dict[str, float]]

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, from torch's generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss to minimise."""

    @abstractmethod
    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """Yield this rank's examples, `batch` of them for each step."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Return the score on the test set."""


def _epochs(examples: int, task: Task, seed: int, rank: int, size: int) -> Iterator[torch.Tensor]:
    """Yield the positions of a rank's next examples; no two ranks see one in the same epoch."""
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        order = torch.randperm(examples, generator=generator)[rank::size]
        for begin in range(0, examples // size - task.batch + 1, task.batch):
            if step == task.steps:
                return
            yield order[begin : begin + task.batch]
            step += 1


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) and labels of scikit-learn's digits: training, then 360 for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return x[360:], y[360:], x[:360], y[:360]


class Digits(Task):
    """A CNN of 151 000 parameters on scikit-learn's digits; the score is accuracy in points."""

    name, score, margin, relative = "digits", "accuracy, points", 0.1, False
    batch, steps = 32, 220
    rates: ClassVar = {"sgd": 0.1, "adam": 0.005, "adamw": 0.005}

    def model(self) -> nn.Module:
        """See Task."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """See Task."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """See Task."""
        x, y, _, _ = _digits()
        for chosen in _epochs(len(y), self, seed, rank, size):
            yield x[chosen], y[chosen]

    def evaluate(self, model: nn.Module) -> float:
        """See Task."""
        _, _, x, y = _digits()
        with torch.no_grad():
            return 100 * float((model(x).argmax(1) == y).float().mean())


class Denoising(Task):
    """An autoencoder removes noise from digits; the score is minus the mean squared error."""

    name, score, margin, relative = "denoising", "-loss", 0.005, True
    batch, steps = 32, 440
    rates: ClassVar = {"sgd": 1.0, "adam": 0.005, "adamw": 0.005}

    def model(self) -> nn.Module:
        """See Task."""
        return nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16),
            nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """See Task."""
        return F.mse_loss(model(batch[0]), batch[1])

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """See Task."""
        x = _digits()[0].flatten(1)
        noise = torch.Generator().manual_seed(1000 * seed + rank)
        for chosen in _epochs(len(x), self, seed, rank, size):
            clean = x[chosen]
            yield clean + 0.3 * torch.randn(clean.shape, generator=noise), clean

    def evaluate(self, model: nn.Module) -> float:
        """See Task."""
        clean = _digits()[2].flatten(1)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            return -float(F.mse_loss(model(clean + 0.3 * noise), clean))


_CONTEXT = 64


@functools.cache
def _text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Characters for training and for the test, and how many different ones there are.

    The sentences are made up by rules: words of syllables, common and rare ones, in four classes. A
    sentence's verb ends as the class of its noun says, which stands up to 30 characters before it.
    """
    generator = torch.Generator().manual_seed(11)

    def pick(weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=generator))

    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    usual = torch.ones(len(syllables))
    words = ["".join(syllables[pick(usual)] for _ in range(2 + n % 2)) for n in range(240)]
    zipf = 1 / torch.arange(1.0, 61.0)
    endings = ("an", "el", "is", "or")
    pieces: list[str] = []
    for _ in range(9000):
        kind, other = pick(torch.ones(4)), pick(torch.ones(4))
        noun, verb, goal = (words[60 * n + pick(zipf)] for n in (0, 1, 2))
        extra = [words[180 + pick(zipf)] for _ in range(pick(torch.ones(3)))]
        subject, ending = noun + endings[kind], endings[kind]
        pieces.append(" ".join([subject, *extra, verb + ending, goal + endings[other]]) + ". ")
    text = "".join(pieces)
    symbols = {symbol: n for n, symbol in enumerate(sorted(set(text)))}
    numbers = torch.tensor([symbols[symbol] for symbol in text])
    return numbers[20_000:], numbers[:20_000], len(symbols)


class _Transformer(nn.Module):
    def __init__(self, symbols: int, width: int = 128, layers: int = 5) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for parameter in self.layers.parameters():  # all layers begin as copies of one
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.symbols(x) * math.sqrt(self.places.shape[1]) + self.places
        scores: torch.Tensor = self.scores(self.norm(self.layers(seen, self.mask, is_causal=True)))
        return scores


class Text(Task):
    """A transformer of 1.0 million parameters on made-up sentences; -loss per character."""

    name, score, margin, relative = "text", "-loss", 0.005, True
    batch, steps = 8, 400
    rates: ClassVar = {"sgd": 0.8, "adam": 0.001, "adamw": 0.001}

    def model(self) -> nn.Module:
        """See Task."""
        return _Transformer(_text()[2])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """See Task."""
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """See Task."""
        text = _text()[0]
        windows = text[: (len(text) - 1) // _CONTEXT * _CONTEXT].view(-1, _CONTEXT)
        following = text[1 : windows.numel() + 1].view(-1, _CONTEXT)
        for chosen in _epochs(len(windows), self, seed, rank, size):
            yield windows[chosen], following[chosen]

    def evaluate(self, model: nn.Module) -> float:
        """See Task."""
        text = _text()[1]
        windows = text[:-1][: (len(text) - 1) // _CONTEXT * _CONTEXT].view(-1, _CONTEXT)
        following = text[1:][: windows.numel()].view(-1, _CONTEXT)
        with torch.no_grad():
            return -float(self.loss(model, (windows, following)))


TASKS: dict[str, Task] = {task.name: task for task in (Digits(), Text(), Denoising())}
