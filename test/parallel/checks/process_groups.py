"""A default process group of the backend "perseus", and tensors for it that differ per rank."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from patterns import shared_folder, values

import perseus.torch.distributed
import perseus.torch.horovod as hvd

# Moved but not reduced by the core, as bytes or pairs of numbers.
OTHERS = [torch.complex64, torch.complex128, torch.float8_e5m2, torch.uint16, torch.uint32]


@contextmanager
def process_group(seconds: float = 60) -> Iterator[None]:
    """The default group, of all ranks."""
    perseus.torch.distributed.register()
    place = f"file://{shared_folder()}/store"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "perseus", init_method=place, rank=hvd.rank(), world_size=hvd.size(), timeout=timeout
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def mine(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return of(hvd.rank(), shape, dtype, salt)


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    if dtype in OTHERS:
        return values(shape, torch.uint8, rank, salt).to(dtype)
    return values(shape, dtype, rank, salt)
