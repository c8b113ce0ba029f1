"""Elastic training in which rank 1 is killed, and a new process takes its place.

    perseusrun -np 3 --min-np 2 --blacklist-cooldown-range 1 2 python elastic_replacement.py FOLDER

Every rank is a host of its own, and gradients travel as int8. The new rank gets the model, the
optimizer's moments and the sampler's progress from rank 0. Survivors keep what their codecs hold
back, and the new rank begins with nothing. It forms its groups of gradients while survivors
wait for it in another collective.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import perseus.torch as hvd

STEPS = 8
SAMPLES = torch.arange(96.0).reshape(32, 3).sin()
LABELS = torch.arange(32) % 4
killed = Path(sys.argv[1]) / "killed"

os.environ.update(LIGHT_2D_ALLREDUCE="1", LIGHT_INTRA_SIZE="1", PERSEUS_ALLREDUCE_CODEC="int8")
hvd.init()
torch.manual_seed(10 + hvd.rank())  # sync makes them equal
model = nn.Sequential(nn.Linear(3, 2048), nn.ReLU(), nn.Linear(2048, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.001), model.named_parameters(), groups=2
)
sampler = hvd.elastic.ElasticSampler(SAMPLES, seed=3)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, taken_in=-1)


def held() -> bool:
    """Whether codecs of this rank hold something back."""
    residuals = optimizer.state_dict().get("perseus_residuals", {})
    return any(bool(numbers.any()) for _, numbers in residuals.values())


@hvd.elastic.run
def train(state):
    print(f"enter {hvd.rank()} {hvd.size()} {state.step} {held()} {os.getpid()}", flush=True)
    if hvd.size() == 3 and killed.exists():
        state.taken_in = max(state.taken_in, state.step)
    # After the last rank has come, all train for as many steps again.
    while state.step < STEPS or state.taken_in < 0 or state.step < state.taken_in + STEPS:
        indices = list(state.sampler)[:4]
        state.optimizer.zero_grad()
        F.cross_entropy(state.model(SAMPLES[indices]), LABELS[indices]).backward()
        state.optimizer.step()
        state.step += 1
        state.sampler.record_batch(0, 4)
        if len(state.sampler) - state.sampler.processed_num // hvd.size() < 4:
            state.sampler.set_epoch(state.sampler.epoch + 1)
        if state.step == 4 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()


train(state)
tensors = [*model.state_dict().values()]
tensors += [moment for each in optimizer.state_dict()["state"].values() for moment in each.values()]
digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
print(f"finished {hvd.rank()} {state.step} {state.sampler.epoch} {digest[:8]} {held()}", flush=True)
hvd.shutdown()
