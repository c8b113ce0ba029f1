"""A rank that is killed, stops or cannot be reached ends what others do in torch.distributed.

It is named, within twice the group's timeout.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytestmark = pytest.mark.shared
SIZE, VICTIM, TIMEOUT = 3, 1, 4
BUSY = 4.0  # seconds that a busy machine may add
# Every form waits for the victim in a group of its own, since a group fails as a whole.
PROGRAM = """
import datetime, json, sys, time, warnings
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import perseus.torch.distributed

warnings.simplefilter("ignore")
store, rank, size, victim, timeout = sys.argv[1], *map(int, sys.argv[2:])
limit = datetime.timedelta(seconds=timeout)
dist.init_process_group(
    "perseus", init_method=f"file://{store}", rank=rank, world_size=size,
    timeout=datetime.timedelta(seconds=60),
)
x = torch.full((1000,), rank + 1.0)
large = torch.full((300_000,), rank + 1.0)
whole = torch.empty(1000 * size)
parts = [torch.empty(1000) for _ in range(size)]
pool = ThreadPoolExecutor(8)
models = {}

def coalesced(group):
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(x.clone(), group=group)
        dist.all_reduce(large.clone(), group=group)
    return manager.works

def batch(group):
    sent = dist.P2POp(dist.isend, large, victim, group)
    received = dist.P2POp(dist.irecv, large.clone(), victim, group)
    return dist.batch_isend_irecv([sent, received])

def backward(group):
    models[group](torch.ones(4, 8)).sum().backward()

FORMS = {
    "all_reduce": lambda g: dist.all_reduce(x.clone(), group=g, async_op=True),
    "all_reduce of bits": lambda g: dist.all_reduce(
        torch.ones(9, dtype=torch.int32), dist.ReduceOp.BXOR, group=g, async_op=True),
    "all_reduce of sparse tensors": lambda g: dist.all_reduce(
        torch.eye(3).to_sparse(), group=g, async_op=True),
    "coalesced": coalesced,
    "reduce": lambda g: dist.reduce(x.clone(), dst=0, group=g, async_op=True),
    "broadcast": lambda g: dist.broadcast(x.clone(), src=victim, group=g, async_op=True),
    "all_gather": lambda g: dist.all_gather(parts, x, group=g, async_op=True),
    "all_gather_single": lambda g: dist.all_gather_into_tensor(whole, x, group=g, async_op=True),
    "gather": lambda g: dist.gather(x, parts if rank == 0 else None, dst=0, group=g, async_op=True),
    "scatter": lambda g: dist.scatter(
        x.clone(), parts if rank == 0 else None, src=0, group=g, async_op=True),
    "reduce_scatter": lambda g: dist.reduce_scatter(x.clone(), parts, group=g, async_op=True),
    "reduce_scatter_single": lambda g: dist.reduce_scatter_tensor(
        x.clone(), whole.clone(), group=g, async_op=True),
    "all_to_all": lambda g: dist.all_to_all(parts, parts, group=g, async_op=True),
    "all_to_all_single": lambda g: dist.all_to_all_single(
        whole, whole.clone(), group=g, async_op=True),
    "send": lambda g: dist.isend(x, victim, group=g),
    "large send": lambda g: dist.isend(large, victim, group=g),
    "recv": lambda g: dist.irecv(x.clone(), victim, group=g),
    "recv from any rank": lambda g: dist.irecv(x.clone(), group=g),
    "batch": batch,
    "barrier": lambda g: dist.barrier(group=g, async_op=True),
}
BLOCKING = {
    "objects": lambda g: dist.all_gather_object([None] * size, rank, group=g),
    "DDP": backward,
}
groups = {name: dist.new_group(timeout=limit) for name in (*FORMS, *BLOCKING)}
for group in groups.values():
    dist.all_reduce(x.clone(), group=group)
models[groups["DDP"]] = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=groups["DDP"])
backward(groups["DDP"])
dist.barrier()
print("ready", flush=True)
if rank == victim:
    sys.stdin.read()
    time.sleep(600)
sys.stdin.readline()
works = {name: form(groups[name]) for name, form in FORMS.items()}
waits = {name: pool.submit(form, groups[name]) for name, form in BLOCKING.items()}
for number, (name, work) in enumerate(works.items()):
    # With a limit of its own, a wait ends by what has happened to the group all the same.
    limits = (datetime.timedelta(seconds=60),) if number % 2 else ()
    for turn, one in enumerate(work if isinstance(work, list) else [work]):
        waits[f"{name}, work {turn}"] = pool.submit(one.wait, *limits)
errors = {}
for name, waiting in waits.items():
    try:
        waiting.result()
        errors[name] = ""
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"
def kind(group):
    backend = group if hasattr(group, "world") else group._get_backend(torch.device("cpu"))
    return backend.get_error().name

# A receive may have ended for want of a send, just before its group ends for want of the rank.
deadline = time.monotonic() + 10
while "SUCCESS" in (kinds := sorted({kind(group) for group in groups.values()})):
    if time.monotonic() > deadline:
        break
    time.sleep(0.05)
print(json.dumps([errors, kinds]), flush=True)
"""


@contextmanager
def started(folder: Path, hosts: VirtualHosts | None) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks, each on a host of its own if there are hosts."""
    ranks = []
    try:
        for rank in range(SIZE):
            numbers = [str(number) for number in (rank, SIZE, VICTIM, TIMEOUT)]
            command = [sys.executable, "-c", PROGRAM, str(folder / "store"), *numbers]
            popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
            if hosts is not None:
                popen = partial(hosts.popen, rank)
            ranks.append(popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("how", ["killed", "stopped", "unreachable"])
def test_every_collective_names_the_rank_that_it_waited_for(tmp_path, how):
    with ExitStack() as stack:
        hosts = None
        if how == "unreachable":
            if reason := unavailable():
                pytest.skip(reason)
            hosts = stack.enter_context(VirtualHosts(SIZE, ssh=False))
        ranks = stack.enter_context(started(tmp_path, hosts))
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        if hosts is None:
            ranks[VICTIM].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        else:
            hosts.set_link(VICTIM, up=False)
        survivors = [process for rank, process in enumerate(ranks) if rank != VICTIM]
        begun = time.monotonic()
        for process in survivors:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in survivors:
            errors, kinds = json.loads(process.stdout.readline())
            assert len(errors) >= 23  # the forms, some as several works
            for form, error in errors.items():
                # A receive from any rank that nobody answers in time names all who could have.
                assert re.search(rf"ranks? ([\d, ]*\b)?{VICTIM}\b", error), (form, error)
                assert error.startswith("DistBackendError: "), (form, error)
            # The survivor that notices first tells the other.
            assert set(kinds) <= {"COMM_ERROR" if how == "killed" else "TIMEOUT", "REMOTE_ERROR"}
        assert time.monotonic() - begun < 2 * TIMEOUT + BUSY
