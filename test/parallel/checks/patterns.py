"""Values that differ per rank and index and are exact in every dtype; asserts; other settings."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

import perseus.torch.horovod as hvd
from perseus.process_sets import ids_and_ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
ALL = [*FLOATS, *INTEGERS, torch.bool]
SHAPES = [(0,), (1,), (17,), (5, 7), (3, 0, 2), (1031,), ()]


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int = 0) -> torch.Tensor:
    """Small whole numbers; unsigned ones and bools do not get negative ones."""
    count = 1
    for extent in shape:
        count *= extent
    index = torch.arange(count, dtype=torch.int64)
    numbers = (index * 7 + rank * 5 + salt * 3 + index // 11) % 9
    if dtype == torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    if dtype != torch.uint8:
        numbers = numbers - 4
    return numbers.to(dtype).reshape(shape)


def everyone(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The values of all ranks, stacked, in float64."""
    return torch.stack(
        [values(shape, dtype, rank, salt).to(torch.float64) for rank in range(hvd.size())]
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in shape, dtype and every element (zeros of either sign are equal)."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape} instead of {expected.shape}"
    assert torch.equal(actual, expected), f"{actual} instead of {expected}"


def raised(kind: type[BaseException], function: Callable[[], object]) -> str:
    """The message of the exception that `function` must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def assert_job_usable() -> None:
    """The next collective works and gives the right numbers."""
    assert_same(
        hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="still_usable"),
        torch.tensor([float(sum(range(hvd.size())))]),
    )


def shared_folder() -> str:
    """A new folder, the same on all ranks; it lies among the temporary files of the tests."""
    return hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "", root_rank=0)


def let_gloo_finish() -> None:
    """Before what may free a group on gloo last, as a DDP model: that waits for the group's threads
    with the interpreter's lock held, which they need as long as they have work to free (2.13)."""
    time.sleep(0.1)


@contextmanager
def world_with(**settings: object) -> Iterator[None]:
    """A world of the same ranks with other settings; the old ones come back afterwards."""
    hvd.barrier()
    hvd.shutdown()
    os.environ.update({name: str(value) for name, value in settings.items()})
    hvd.init()
    yield
    hvd.barrier()
    hvd.shutdown()
    for name in settings:
        del os.environ[name]
    hvd.init()


def apart(**settings: object) -> AbstractContextManager[None]:
    """A world whose ranks are hosts of their own: what goes between hosts goes between all."""
    return world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=1, **settings)


def nan_check(action: str) -> dict[str, object]:
    """What world_with() takes to search gradients for NaN."""
    return {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": action}


@contextmanager
def stderr_lines() -> Iterator[list[str]]:
    """Lines that anything in this process writes to standard error, once it is over."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+") as file:
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(old, 2)
            os.close(old)
            file.seek(0)
            lines += file.read().splitlines()


@contextmanager
def added(*members: list[int]) -> Iterator[list[hvd.ProcessSet]]:
    """Process sets that are gone afterwards; they must be dynamic."""
    sets = [hvd.add_process_set(ranks) for ranks in members]
    yield sets
    for process_set in sets:
        assert hvd.remove_process_set(process_set)
    assert list(ids_and_ranks()) == [0]
    assert_job_usable()
