"""Training with PyTorch goes on, or ends in time with the rank named, whatever happens to it."""

from __future__ import annotations

from pathlib import Path

import declared_faults
import pytest

pytest.importorskip("torch")

_HVD = [
    "memory (1, 3), shm",
    "clock jumps forth (1, 3), tcp",
    "output directory full (1, 3), shm",
    "timeline's disk full (0, 3), tcp",
]
_DDP = [
    "clock jumps back (0, 5), shm",
    "flight recorder's disk full (1, 3), tcp",
]


@pytest.mark.parametrize("case", declared_faults.cases("hvd", _HVD))
def test_with_the_horovod_api(case: declared_faults.Case, tmp_path: Path) -> None:
    declared_faults.run(case, tmp_path)


@pytest.mark.parametrize("case", declared_faults.cases("ddp", _DDP))
def test_with_distributed_data_parallel(case: declared_faults.Case, tmp_path: Path) -> None:
    declared_faults.run(case, tmp_path)
