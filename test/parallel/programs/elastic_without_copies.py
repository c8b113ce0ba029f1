"""A rank of an elastic job that commits after every step without a copy: none is done again.

perseusrun -np 3 --min-np 2 python elastic_without_copies.py DIRECTORY

In step 5, rank 0 fails when the others have all averages, and is a step behind them. In step 8, the
last rank of the three is killed.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import perseus.torch.horovod as hvd

STEPS = 12
folder = Path(sys.argv[1])
failed = folder / "failed"


def gradient(step):
    """The same on every rank, so that the number of ranks does not matter."""
    return (torch.arange(50.0) * 7 + step * 31) % 13


def trained(steps):
    """What the parameter is after so many steps."""
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([parameter], lr=0.125, momentum=0.5)
    for step in range(steps):
        parameter.grad = gradient(step)
        optimizer.step()
    return parameter.detach()


hvd.init()
model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((50,), float(hvd.rank())))])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5),
    named_parameters=model.named_parameters(),
)
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def train(state):
    if state.step == 0:
        torch.nn.init.zeros_(model[0])
    print(f"enter {hvd.rank()} {hvd.size()} {state.step} {os.getpid()}", flush=True)
    assert torch.equal(model[0], trained(state.step)), state.step
    while state.step < STEPS:
        if state.step == 8 and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model[0] * gradient(state.step)).sum().backward()
        if state.step == 5 and hvd.rank() == 0 and not failed.exists():
            failed.touch()
            deadline = time.monotonic() + 60
            while len(list(folder.glob("stepped*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            raise hvd.HorovodInternalError("on purpose")
        optimizer.step()
        if state.step == 5:
            (folder / f"stepped{os.getpid()}").touch()
        print(f"did {os.getpid()} {state.step}", flush=True)
        state.step += 1
        state.commit(copy=False)


train(state)
right = torch.equal(model[0], trained(STEPS))
print(f"finished {hvd.rank()} {os.getpid()} {right}", flush=True)
hvd.shutdown()
