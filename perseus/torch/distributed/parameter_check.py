"""Compares a DistributedDataParallel's parameters every PERSEUS_PARAMETER_CHECK_N_STEPS passes.

As perseus.gradients.parameter_check does for optimizers, but within the reduction of a pass's first
bucket, in which ranks that have joined take part, too. Belongs to the thread that runs hooks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import torch

from perseus import _core
from perseus.errors import MismatchError
from perseus.gradients.parameter_check import SETTING, difference
from perseus.operations import Kind
from perseus.torch.distributed.world import World
from perseus.torch.functions import buffer_of

_REMEDY = (
    "Change parameters on all ranks alike, after DistributedDataParallel has made them equal, and "
    "let every rank step with the gradients that it has averaged."
)


class ModelCheck:
    """names: of the parameters. number: the model's, the same on all ranks of the world."""

    def __init__(self, names: dict[torch.Tensor, str], number: int, world: World) -> None:
        self._names = names
        self._name = f"parameter_check.model {number}"
        self._world = world
        self._every = world.context.setting(SETTING) if world.size > 1 else 0
        self._begun = 0

    def begin(self, has_joined: bool) -> Callable[[], None] | None:
        """Count a pass; if a comparison is due, start it and return what raises MismatchError.

        Nothing is compared while a rank has joined: it takes no steps, and its parameters are old.
        """
        taken, self._begun = self._begun, self._begun + 1
        if self._every == 0 or taken == 0 or taken % self._every != 0:
            return None
        hashes = [0 if has_joined else _core.hash_bytes(buffer_of(p)) for p in self._names]
        packed = bytearray(struct.pack(f"<{len(hashes)}Q", *hashes))
        row = torch.frombuffer(packed, dtype=torch.int64).view(1, -1)
        return partial(
            self._end, self._world.operations.submit(Kind.ALLGATHER, self._name, row), taken
        )

    def _end(self, handle: int, taken: int) -> None:
        rows = self._world.operations.synchronize(handle)
        if rows.eq(rows[0]).all() or not rows.any(dim=1).all():
            return
        by_rank = [
            [(name, number % 2**64) for name, number in zip(self._names.values(), row, strict=True)]
            for row in rows.tolist()
        ]
        found = difference(by_rank, list(range(self._world.size)))
        raise MismatchError(f"[{SETTING}] after {taken} backward passes {found}. {_REMEDY}")
