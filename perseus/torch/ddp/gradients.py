"""What a DDP bucket contains, and how an exchange averages it. Stateless."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

# What a rank holds back of one parameter: float32 tensors of one dimension, by kind.
Held = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parameter:
    """A parameter in a bucket. first: its first element there."""

    key: str
    shape: tuple[int, ...]
    first: int
    size: int

    @property
    def elements(self) -> slice:
        """Its elements in the bucket."""
        return slice(self.first, self.first + self.size)


@dataclass(frozen=True)
class Gradients:
    """A bucket. flat: this rank's gradients, of one dimension, which the mean replaces."""

    flat: torch.Tensor
    parameters: Sequence[Parameter]
    last: bool  # of this step

    @property
    def keys(self) -> tuple[str, ...]:
        """Identify the bucket: another one has other parameters, or another order."""
        return tuple(parameter.key for parameter in self.parameters)

    def copy(self) -> Gradients:
        """Return the same bucket with its own values."""
        return replace(self, flat=self.flat.clone())


class Exchange(ABC):
    """Replaces gradients by their mean over the ranks, the same bits on every rank.

    Several threads may average different buckets at once, if is_ready().
    """

    @abstractmethod
    def average(self, gradients: Gradients, group: dist.ProcessGroup, step: int) -> None:
        """Replace gradients.flat. group: of at least two ranks."""

    def held(self) -> dict[str, Held]:
        """Return copies of what this rank holds back, by parameter."""
        return {}

    def restore(self, held: Mapping[str, Held]) -> None:  # noqa: B027 - most hold nothing back
        """Replace everything that is held back by a result of held()."""

    def is_ready(self) -> bool:
        """Return whether buckets do not depend on each other; asked between steps."""
        return True

    def choice(self) -> str | None:
        """Return the name of the exchange that this one has chosen, if it chooses."""
        return None

    def choose(self, name: str | None) -> None:  # noqa: B027 - most have no choice
        """Take up a result of choice()."""


class Exact(Exchange):
    """An all-reduce."""

    def average(self, gradients: Gradients, group: dist.ProcessGroup, step: int) -> None:
        """Divide, then sum."""
        gradients.flat.div_(group.size())
        dist.all_reduce(gradients.flat, group=group)


class Record(ABC):
    """What an exchange with error feedback keeps of one bucket."""

    @abstractmethod
    def split(self) -> dict[str, Held]:
        """Return copies of what is held back, by parameter."""

    @abstractmethod
    def take(self, key: str, held: Held) -> None:
        """Set what is held back of a parameter."""


class FeedbackExchange(Exchange):
    """An exchange that holds values back, and keeps them when DDP forms other buckets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[str, ...], Any] = {}
        self._bucket_of: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, Held] = {}

    @abstractmethod
    def _begin(self, gradients: Gradients, group: dist.ProcessGroup) -> Any:
        """Return the Record of a new bucket, with nothing held back."""

    def _record(self, gradients: Gradients, group: dist.ProcessGroup) -> Any:
        keys = gradients.keys
        with self._lock:
            record = self._records.get(keys)
            if record is None:
                for key in keys:
                    former = self._records.pop(self._bucket_of.get(key, ()), None)
                    if former is not None:
                        self._waiting.update(former.split())
                self._records[keys] = record = self._begin(gradients, group)
                for key in keys:
                    self._bucket_of[key] = keys
                    if key in self._waiting:
                        record.take(key, self._waiting.pop(key))
        return record

    def held(self) -> dict[str, Held]:
        """Return copies of what this rank holds back, by parameter."""
        found = {key: dict(held) for key, held in self._waiting.items()}
        for record in self._records.values():
            found.update(record.split())
        return found

    def restore(self, held: Mapping[str, Held]) -> None:
        """Replace everything that is held back by a result of held()."""
        self._records.clear()
        self._bucket_of.clear()
        self._waiting = {key: dict(tensors) for key, tensors in held.items()}
