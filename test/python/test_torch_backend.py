"""The backend of torch.distributed in one process: how torch finds it, and who is missing."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

import perseus.torch.distributed
from perseus.errors import InitializationError

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_BESIDE_OTHERS = pytest.mark.skipif(
    _VERSION < (2, 14), reason="torch before 2.14 calls a backend in Python past all that watches"
)


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
                _VERSION >= (2, 14), reason="torch does nothing for meta tensors, on any backend"
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
print(f"ended with {tensor.tolist()}", flush=True)  # torchrun runs Python with -u
"""


@pytest.mark.shared
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


ON_TWO_RANKS = """
import json, sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
import perseus.torch.distributed
place, rank = f"file://{sys.argv[1]}", int(sys.argv[2])
dist.init_process_group("perseus", init_method=place, rank=rank, world_size=2)
tensor = torch.full((3,), rank + 1.0)
"""


def on_two_ranks(folder: Path, program: str, **environment: str) -> list[str]:
    """What each rank prints."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ON_TWO_RANKS + program, str(folder / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return said


RECORDED = """
dist.all_reduce(tensor)
dist.broadcast(tensor, 0)
dist.all_gather([torch.empty(3), torch.empty(3)], tensor)
print(c10d._dump_fr_trace_json(backend="perseus").decode())
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    _VERSION < (2, 15),
    reason="before torch 2.15 only what ProcessGroupNCCL and ProcessGroupGloo do can be read",
)
def test_torchs_flight_recorder_sees_every_collective_once_it_is_asked_for(tmp_path):
    for said in on_two_ranks(tmp_path, RECORDED, TORCH_FR_BUFFER_SIZE="100"):
        entries = json.loads(said)["entries"]
        names = [entry["profiling_name"] for entry in entries]
        assert names == ["perseus:all_reduce", "perseus:broadcast", "perseus:all_gather"]
        assert [entry["input_sizes"] for entry in entries] == [[[3]]] * 3


MISMATCHED = """
for call in (
    lambda: dist.all_reduce(torch.ones(3 + rank)),
    lambda: dist.all_reduce(tensor) if rank == 0 else dist.broadcast(tensor, 0),
):
    try:
        call()
        print("no error")
    except RuntimeError as error:
        print(str(error).split(". ")[0])
dist.all_reduce(tensor)
print(tensor.tolist())
dist.destroy_process_group()
"""


@_BESIDE_OTHERS
def test_torchs_detailed_debug_mode_finds_mismatches(tmp_path):
    for said in on_two_ranks(tmp_path, MISMATCHED, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        found = "Detected mismatch between collectives on ranks"
        assert said.splitlines() == [found, found, "[3.0, 3.0, 3.0]"]
