"""Elastic training in which one rank fails three times, against the same training undisturbed.

    perseusrun -np 3 python elastic_training.py FAILING_RANK

The failing rank raises in the middle of a step: with all its reductions started, with some, and
with reductions that the others have not started, since they wait for an operation that it leaves
out. Everybody goes back to the last commit; weights, moments and the samples of every batch end as
those of the undisturbed run.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import perseus.torch.horovod as hvd
from perseus import basics

EPOCHS, BATCH, COMMIT_EVERY = 2, 3, 2
SAMPLES = torch.arange(108.0).reshape(36, 3).sin()
LABELS = torch.arange(36) % 4
failing_rank = int(sys.argv[1])


class HalfFailing(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        raise hvd.HorovodInternalError("injected in backward")


def make():
    torch.manual_seed(10 + hvd.rank())  # sync makes them equal
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(SAMPLES, seed=3)
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)


def run(failures):
    """Train; at the (epoch, batch) in `failures`, the failing rank raises as they say, once."""
    starts, seen = [], {}

    @hvd.elastic.run
    def train(state):
        starts.append((basics._world.epoch, state.epoch, state.batch))
        while state.epoch < EPOCHS:
            for indices in list(torch.tensor(list(state.sampler)).split(BATCH)):
                step(state, indices)
                state.batch += 1
                state.sampler.record_batch(state.batch, BATCH)
                if state.batch % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()

    def step(state, indices):
        how = None
        if hvd.rank() == failing_rank:
            how = failures.pop((state.epoch, state.batch), None)
        state.optimizer.zero_grad()
        scores = state.model[:2](SAMPLES[indices])
        if how == "half":
            scores = HalfFailing.apply(scores)
        loss = F.cross_entropy(state.model[2](scores), LABELS[indices])
        if how != "ahead":
            hvd.barrier()
        loss.backward()
        if how in ("all", "ahead"):
            raise hvd.HorovodInternalError("injected after backward")
        hvd.allreduce(loss.detach(), name="loss")
        state.optimizer.step()
        seen[state.epoch, state.batch] = indices.tolist()

    state = make()
    train(state)
    assert not failures or hvd.rank() != failing_rank, failures
    return state, starts, seen


def bits(state):
    moments = [
        value
        for _, entry in sorted(state.optimizer.state_dict()["state"].items())
        for _, value in sorted(entry.items())
    ]
    return [*state.model.state_dict().values(), *moments]


hvd.init()
rank, size = hvd.rank(), hvd.size()
calm, starts, calmly_seen = run({})
first = basics._world.epoch
assert starts == [(first, 0, 0)], starts
disturbed, starts, seen = run({(0, 2): "all", (1, 0): "ahead", (1, 1): "half"})
# Batch 2 of the first epoch and batch 0 of the second followed a commit.
assert starts == [(first + n, *at) for n, at in enumerate([(0, 0), (0, 2), (1, 0), (1, 0)])], starts
assert (hvd.rank(), hvd.size()) == (rank, size)

assert len(bits(calm)) == 4 + 4 * 3, len(bits(calm))
for expected, found in zip(bits(calm), bits(disturbed), strict=True):
    assert torch.equal(expected, found)
assert seen == calmly_seen, seen
everyone = hvd.allgather_object((seen, [p.tolist() for p in disturbed.model.parameters()]))
assert all(weights == everyone[0][1] for _, weights in everyone)
for epoch in range(EPOCHS):
    dealt = [
        i for own, _ in everyone for (e, _), indices in own.items() if e == epoch for i in indices
    ]
    assert sorted(dealt) == list(range(36)), dealt
print(f"rank {rank} finished", flush=True)
hvd.shutdown()
