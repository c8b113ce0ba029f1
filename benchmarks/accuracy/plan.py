"""The cells of docs/accuracy.md and how many seeds each needs. Immutable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from choices import CHOICES, LOCAL_STEPS
from tasks import TASKS

_SEEDS = {"digits": 200, "text": 30, "denoising": 30}
_SEEDS_ELSEWHERE = 20


@dataclass(frozen=True)
class Cell:
    """A row's conditions. scale: the learning rate, relative to the tuned one."""

    task: str
    choice: str
    optimizer: str = "sgd"
    ranks: int = 2
    scale: float = 1.0


def cells() -> Iterator[tuple[Cell, int]]:
    """Yield every cell with its number of seeds; those that the bars name come first."""
    for task in TASKS:
        for choice in CHOICES:
            yield Cell(task, choice), _SEEDS[task]
    for ranks in (4, 8):
        for choice in CHOICES:
            yield Cell("digits", choice, ranks=ranks), _SEEDS_ELSEWHERE
    for optimizer in ("adam", "adamw"):
        for choice in CHOICES:
            yield Cell("digits", choice, optimizer=optimizer), _SEEDS_ELSEWHERE
    for scale in (0.5, 2.0):
        for choice in CHOICES:
            yield Cell("digits", choice, scale=scale), _SEEDS_ELSEWHERE
    for ranks in (2, 4):
        for choice in LOCAL_STEPS:
            yield Cell("digits", choice, ranks=ranks), _SEEDS_ELSEWHERE
