"""The cells of docs/accuracy.md and how many seeds each needs. Immutable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from choices import CHOICES, LOCAL_STEPS
from tasks import TASKS

_SEEDS = {"digits": 200, "text": 30, "denoising": 30}
_SEEDS_ELSEWHERE = 20
_SEEDS_LONGER = 5

# These rows tell how many more steps make up for what a choice loses: they compare with exact
# training of the usual length.
_LONGER = {"text": {"topk:0.01": (1.2, 1.5), "powersgd:4": (1.1, 1.2), "rotate:8": (1.1,)}}


@dataclass(frozen=True)
class Cell:
    """A row's conditions.

    scale: the learning rate, relative to the tuned one. length: the number of steps, relative to
        the task's.
    """

    task: str
    choice: str
    optimizer: str = "sgd"
    ranks: int = 2
    scale: float = 1.0
    length: float = 1.0

    @property
    def label(self) -> str:
        """What tells this row from the others of its table."""
        return self.choice if self.length == 1 else f"{self.choice}, {self.length:g} × the steps"


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
    for task, longer in _LONGER.items():
        for choice, lengths in longer.items():
            for length in lengths:
                yield Cell(task, choice, length=length), _SEEDS_LONGER
