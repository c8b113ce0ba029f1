"""Shares a dataset among the ranks, and its remaining samples when the ranks change.

Adapters derive their frameworks' samplers from it. Belongs to the training thread. Source of
behaviour: Horovod 0.28.1, horovod.torch.elastic.sampler.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from perseus.basics import rank, size


class ElasticSampler:
    """Gives every rank its share of the samples that this epoch has not processed yet.

    dataset: anything with a length. shuffle, seed: the order of epoch e is that of
    random.Random(seed + e), equal on all ranks.

    Call record_batch after each batch and set_epoch at the end of an epoch; put the sampler into
    a state, so that progress is committed and restored. Progress takes effect with
    load_state_dict, with reset, and in a new world; a running iterator stays as it is, and
    set_epoch begins an epoch without any. Shares have equal lengths: if the samples cannot be
    divided evenly, the first ones are repeated.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch from its first sample, in that epoch's order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have processed a batch of `batch_size` samples each. batch_idx is not used."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy epoch and progress, and share the remaining samples among the ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress: {"epoch": int, "processed_num": samples of all ranks}."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share the remaining samples of the epoch among the present ranks."""
        self.num_replicas = size()
        self.rank = rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def processed_indices(self) -> set[int]:
        """The samples that this epoch has processed on any rank."""
        return set(self._order()[: self.processed_num])

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        # With fewer samples left than ranks, some are repeated more than once.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(padded)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
