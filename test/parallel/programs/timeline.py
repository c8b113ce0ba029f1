"""Rank 0's timeline is read while all ranks work, after it was stopped, and after a restart.

The last recording is of a short training on all ranks (train.json, train.rank1.json, …).
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import perseus.torch.horovod as hvd

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])


def read(path, goes_on=False):
    """The events. Only a file that is being written may be met in the middle of that."""
    deadline = time.monotonic() + (60 if goes_on else 0)
    while True:
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError:
            if time.monotonic() >= deadline:
                raise


def work(name):
    total = hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]) * (hvd.rank() + 1), name=name, op=hvd.Sum)
    ranks = hvd.size() * (hvd.size() + 1) / 2
    assert total.tolist() == [ranks, 2 * ranks, 3 * ranks]


def mentioned(events):
    found = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    return {name for name in found if name.startswith("allreduce.")}


hvd.init()
work("before")
hvd.start_timeline(FOLDER / "a.json", mark_cycles=True)
work("test_allreduce")
if hvd.rank() == 0:
    deadline = time.monotonic() + 60
    while "allreduce.test_allreduce" not in mentioned(events := read(FOLDER / "a.json", True)):
        assert time.monotonic() < deadline
    kinds = {event["name"] for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SHM_ALLREDUCE", "CYCLE_START"} <= kinds, kinds
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
hvd.barrier()
hvd.stop_timeline()
work("after")
hvd.start_timeline(str(FOLDER / "b.json"))
work("again")
hvd.stop_timeline()
if hvd.rank() == 0:
    assert mentioned(read(FOLDER / "a.json")) == {"allreduce.test_allreduce"}
    assert mentioned(read(FOLDER / "b.json")) == {"allreduce.again"}


hvd.start_timeline(FOLDER / "train.json", mark_cycles=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.full((4, 20), float(hvd.rank()))).square().mean().backward()
    optimizer.step()
hvd.shutdown()
print(f"rank {os.environ['PERSEUS_RANK']} finished", flush=True)
