"""The backend of torch.distributed in one process: how torch finds it, and who is missing."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

import perseus.torch.distributed
from perseus.errors import InitializationError

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_torch_finds_the_backend_by_its_entry_point():
    (found,) = [e for e in entry_points(group="torch.distributed.backends") if e.name == "perseus"]
    found.load()()
    assert dist.is_backend_available("perseus")


@pytest.fixture
def _alone():
    perseus.torch.distributed.register()
    dist.init_process_group("perseus", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_one_rank_alone_is_a_group():
    assert dist.get_backend() == "perseus"
    tensor = torch.arange(5.0)
    dist.all_reduce(tensor)
    parts = [torch.empty(5)]
    dist.all_gather(parts, tensor)
    assert torch.equal(tensor, torch.arange(5.0)) and torch.equal(parts[0], tensor)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(4, 3).t(), "contiguous"),
        (torch.ones(3, dtype=torch.float8_e5m2), "SUM is not defined for torch.float8_e5m2"),
        pytest.param(
            torch.ones(3, device="meta"),
            "meta",
            marks=pytest.mark.skipif(
                _VERSION >= (2, 15), reason="torch does nothing for meta tensors, on any backend"
            ),
        ),
    ],
)
def test_a_tensor_that_cannot_be_reduced_is_refused(tensor, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        dist.all_reduce(tensor)


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1, 2"), (1, "rank 0")])
def test_ranks_that_do_not_come_are_named(rank, missing):
    perseus.torch.distributed.register()
    limit = datetime.timedelta(seconds=1)
    with pytest.raises(InitializationError, match=rf"{missing}.* within 1 s \(timeout="):
        dist.init_process_group(
            "perseus", store=dist.HashStore(), rank=rank, world_size=3, timeout=limit
        )
    assert not dist.is_initialized()


RESTARTED = """
import os, torch, torch.distributed as dist
import perseus.torch.distributed
dist.init_process_group("perseus")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(7)
dist.all_reduce(tensor)
dist.destroy_process_group()
print("ended with", tensor.tolist(), flush=True)
"""


def test_torchrun_restarts_ranks_into_a_new_group(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*torchrun, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended with [6.0, 6.0, 6.0]") == 2, done.stdout
