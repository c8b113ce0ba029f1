"""Changed hosts keep what was not committed, on all ranks at once; other exceptions propagate."""

import torch
from torch import nn

import perseus.torch.horovod as hvd
from perseus import basics
from perseus.elastic import HostUpdateResult, notification_manager

hvd.init()
rank, size = hvd.rank(), hvd.size()
first = basics._world.epoch

model = nn.Linear(2, 2)
nn.init.constant_(model.weight, float(rank))
sampler = hvd.elastic.ElasticSampler(range(6 * size), shuffle=False)
state = hvd.elastic.TorchState(model, sampler=sampler, step=0)
callbacks = []
state.register_reset_callbacks([lambda: callbacks.append(basics._world.epoch)])
seen = []


def hear(change):
    """Rank 0 alone hears of a change; the commit point tells the others."""
    if hvd.rank() == 0:
        notification_manager.handle_hosts_updated(float(len(seen)), change)
    state.check_host_updates()
    raise SystemExit("nobody has interrupted")


@hvd.elastic.run
def train(state, bonus, *, last):
    world = basics._world.epoch - first
    seen.append((world, state.step, model.weight[0, 0].item(), list(sampler)))
    with torch.no_grad():
        model.weight.add_(10 + rank)  # from now on they differ
    sampler.record_batch(0, 2)
    state.step += bonus
    if world == 0:
        hear(HostUpdateResult.added)
    if world == 1:
        hear(HostUpdateResult.removed)
    if state.step < last:
        raise SystemExit(f"step {state.step} of {last}")
    raise KeyError("mine")


try:
    train(state, 2, last=6)
    raise SystemExit("the exception was swallowed")
except KeyError as error:
    assert error.args == ("mine",)


def share(processed):
    return [processed * size + rank + size * i for i in range(6 - processed)]


assert seen == [
    (0, 0, 0.0, share(0)),
    (1, 2, 10.0, share(2)),  # rank 0's weights, not restored
    (2, 4, 20.0 + rank, share(4)),  # after a removal everybody keeps the own ones
], seen
assert callbacks == [first + 1, first + 2]
assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == sum(range(size))
print(f"rank {rank} finished", flush=True)
hvd.shutdown()
