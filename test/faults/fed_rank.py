"""A rank of an elastic job that test_feeds.py starts: most of its model is frozen.

    perseusrun … python fed_rank.py DIRECTORY WHAT

In step 20 rank 2 of the first world kills itself. Training goes on until there have been 20 steps
of the last world, which has three ranks again. WHAT happens while the new rank is fed: "kill" or
"stop", and "survivor" or "new", for the process that does it; "nothing".

Every sync() writes a line of JSON into DIRECTORY/syncs: who, what it had been fed, what it got, and
how long that took.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import perseus.torch.horovod as hvd
from perseus import basics, control

DIRECTORY, WHAT = Path(sys.argv[1]), sys.argv[2]
ROWS, COLUMNS = 1 << 15, 64  # 8 MiB


def write(file: str, **facts: object) -> None:
    with (DIRECTORY / file).open("a", encoding="utf-8") as log:
        log.write(json.dumps({"pid": os.getpid(), "at": time.time(), **facts}) + "\n")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS)  # differs between ranks until the first sync()
        self.table.weight.requires_grad_(False)
        self.head = nn.Linear(COLUMNS, 1)

    def digest(self) -> str:
        values = self.state_dict().values()
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def disturb(new: bool) -> None:
    """Do WHAT once this process takes part in a feed, which takes a second or more."""
    what, _, who = WHAT.partition(" ")
    member = basics.membership()
    while not (feeding := member.feeding) or not feeding._exchange:
        time.sleep(0.01)
    while new and not feeding.blocks:
        time.sleep(0.01)
    write("feeds", new=new)
    if who != ("new" if new else "survivor") or (DIRECTORY / "done").exists():
        return
    (DIRECTORY / "done").touch()
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


is_new = (DIRECTORY / "killed").exists()
basics.membership()  # before there is another thread
threading.Thread(target=disturb, args=(is_new,), daemon=True).start()
hvd.init()
torch.manual_seed(os.getpid())
model = Model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9),
    named_parameters=model.head.named_parameters(),
)
state = hvd.elastic.TorchState(model, optimizer, step=0)
sync = state.sync
sent = 0


def counted(data: bytearray, root_rank: int, name: str) -> None:
    global sent
    sent += len(data) if name == "elastic.blocks" else 0
    broadcast(data, root_rank, name)


broadcast, control.broadcast_bytes = control.broadcast_bytes, counted


def timed_sync() -> None:
    global sent
    member, sent = basics.membership(), 0
    control.barrier()
    before = time.monotonic()
    blocks = len(member.feeding.blocks)
    sync()
    took = time.monotonic() - before
    facts = {"blocks": blocks, "fed": member.place.fed, "sent": sent, "took": took}
    write("syncs", world=member.place.epoch, rank=hvd.rank(), digest=model.digest(), **facts)


state.sync = timed_sync


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    begun = state.step
    while not (is_over := hvd.size() == 3 and begun > 0 and state.step >= begun + 20):
        optimizer.zero_grad()
        rows = torch.randint(0, ROWS, (8,))
        model.head(model.table(rows)).pow(2).mean().backward()
        optimizer.step()
        state.step += 1
        if state.step == 20 and hvd.rank() == 2 and not (DIRECTORY / "killed").exists():
            (DIRECTORY / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        time.sleep(0.02)
    assert is_over


train(state)
write("ends", step=state.step, digest=model.digest())
