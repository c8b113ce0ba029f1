"""Elastic training with process sets: those given to init() come back, dynamic ones do not.

perseusrun -np 3 python elastic_process_sets.py
"""

import os

import torch
from torch import nn

import perseus.torch.horovod as hvd
from perseus.process_sets import ids_and_ranks

first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, int(os.environ["PERSEUS_SIZE"])))
hvd.init(process_sets=[first, rest])
rank, size = hvd.rank(), hvd.size()
mine = first if rank == 0 else rest
torch.manual_seed(3)
model = nn.Linear(2, 1, bias=False)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=mine
)
state = hvd.elastic.TorchState(model, optimizer, step=0)
worlds = []


def expect_sets(*sets):
    everyone = dict(enumerate([list(range(size)), *sets]))
    assert ids_and_ranks() == everyone, ids_and_ranks()


def step():
    """One step of the optimizer over the ranks of this one's set."""
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    (model(torch.ones(1, 2)).sum() * (10.0 + rank)).backward()
    optimizer.step()
    mean = sum(10.0 + r for r in mine.ranks) / mine.size()
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), mean))


@hvd.elastic.run
def train(state):
    worlds.append(mine.process_set_id)
    expect_sets([0], list(range(1, size)))
    step()
    if len(worlds) == 1 and rank == size - 1:
        raise hvd.HorovodInternalError("injected")
    hvd.barrier()  # in the first world it ends with that failure
    step()
    hvd.barrier()  # who leaves earlier ends the others' world


train(state)
assert worlds == [1 if rank == 0 else 2] * 2, worlds

# With dynamic sets the script says what the new world has, as it must with Horovod.
hvd.shutdown()
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init(process_sets=[first])
worlds.clear()
added = hvd.add_process_set(rest)
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)


def add_again():
    assert (first.process_set_id, rest.process_set_id) == (None, None)
    expect_sets()
    assert hvd.add_process_set(added) is rest and hvd.add_process_set(first) is first


state.register_reset_callbacks([add_again])


@hvd.elastic.run
def train_again(state):
    worlds.append((first.process_set_id, rest.process_set_id))
    step()
    if len(worlds) == 1 and rank == 0:
        raise hvd.HorovodInternalError("injected")
    hvd.barrier()


train_again(state)
assert worlds == [(1, 2), (2, 1)], worlds
# A world that is started by hand has what that init() says.
hvd.shutdown()
hvd.init()
expect_sets()
print(f"rank {rank} finished", flush=True)
hvd.shutdown()
