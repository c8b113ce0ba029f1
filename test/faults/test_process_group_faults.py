"""A rank that is killed or stopped ends what other ranks do in torch.distributed, and is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

SIZE, VICTIM, TIMEOUT = 3, 1, 4
# Every form waits for the victim in a group of its own, since a group fails as a whole.
PROGRAM = """
import datetime, json, sys, time
import torch, torch.distributed as dist
import perseus.torch.distributed

store, rank, size, victim, timeout = sys.argv[1], *map(int, sys.argv[2:])
limit = datetime.timedelta(seconds=timeout)
dist.init_process_group(
    "perseus", init_method=f"file://{store}", rank=rank, world_size=size,
    timeout=datetime.timedelta(seconds=60),
)
x = torch.full((1000,), rank + 1.0)
parts = [torch.empty(1000) for _ in range(size)]
FORMS = {
    "all_reduce": lambda g: dist.all_reduce(x.clone(), group=g, async_op=True),
    "reduce": lambda g: dist.reduce(x.clone(), dst=0, group=g, async_op=True),
    "broadcast": lambda g: dist.broadcast(x.clone(), src=victim, group=g, async_op=True),
    "all_gather": lambda g: dist.all_gather(parts, x, group=g, async_op=True),
    "gather": lambda g: dist.gather(x, parts if rank == 0 else None, dst=0, group=g, async_op=True),
    "scatter": lambda g: dist.scatter(
        x.clone(), parts if rank == 0 else None, src=0, group=g, async_op=True),
    "reduce_scatter": lambda g: dist.reduce_scatter(x.clone(), parts, group=g, async_op=True),
    "all_to_all": lambda g: dist.all_to_all(parts, parts, group=g, async_op=True),
    "send": lambda g: dist.isend(x, victim, group=g),
    "recv": lambda g: dist.irecv(x.clone(), victim, group=g),
    "barrier": lambda g: dist.barrier(group=g, async_op=True),
}
groups = {name: dist.new_group(timeout=limit) for name in FORMS}
for name, group in groups.items():
    dist.all_reduce(x.clone(), group=group)
dist.barrier()
print("ready", flush=True)
if rank == victim:
    sys.stdin.read()
    time.sleep(600)
sys.stdin.readline()
works = {name: form(groups[name]) for name, form in FORMS.items()}
errors = {}
for name, work in works.items():
    try:
        work.wait()
        errors[name] = ""
    except dist.DistBackendError as error:
        errors[name] = str(error)
print(json.dumps(errors), flush=True)
"""


@contextmanager
def started(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    ranks = []
    try:
        for rank in range(SIZE):
            numbers = [str(number) for number in (rank, SIZE, VICTIM, TIMEOUT)]
            command = [sys.executable, "-c", PROGRAM, str(folder / "store"), *numbers]
            ranks.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_every_collective_names_the_rank_that_it_waited_for(tmp_path, how):
    with started(tmp_path) as ranks:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        ranks[VICTIM].send_signal(how)
        survivors = [process for rank, process in enumerate(ranks) if rank != VICTIM]
        begun = time.monotonic()
        for process in survivors:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in survivors:
            errors = json.loads(process.stdout.readline())
            for form, error in errors.items():
                assert f"rank {VICTIM}" in error, (form, error)
        assert time.monotonic() - begun < 2 * TIMEOUT + 4  # 4 s: for a busy machine
