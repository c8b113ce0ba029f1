"""A rank of an elastic job with DistributedDataParallel: rank 1 of three is killed, or raises.

perseusrun -np 3 --min-np 2 --blacklist-cooldown-range 1 2 python elastic_ddp.py DIRECTORY HOW

Every rank is a host of its own, and gradients travel as int8: survivors keep what their codecs hold
back, and a new rank begins with nothing.

HOW: killed, before it makes its process group (early), while the others make theirs (between), in a
step (killed), or in a step of a script that destroys its process group whatever happens (tidy); or
raises, after the backward pass, which has changed what is held back.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.distributed  # noqa: F401 - the backend, for torch before 2.14
import perseus.torch.horovod as hvd
from perseus.torch.distributed import launched

STEPS = 8
failed, how = Path(sys.argv[1]) / "failed", sys.argv[2]
committed = "nothing"  # of what codecs of this rank hold back

os.environ.update(LIGHT_2D_ALLREDUCE="1", LIGHT_INTRA_SIZE="1", PERSEUS_ALLREDUCE_CODEC="int8")
hvd.init()
torch.manual_seed(10 + hvd.rank())  # sync makes them equal
model = torch.nn.Sequential(
    torch.nn.Linear(40, 70), torch.nn.BatchNorm1d(70), torch.nn.Linear(70, 3)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = hvd.elastic.TorchState(model, optimizer, step=0, taken_in=-1)


def held(parallel):
    """A digest of what codecs of this rank hold back."""
    saved = parallel.state_dict()._metadata[""].get("perseus_residuals")
    if saved is None:
        return "nothing"
    residuals = sorted(saved["held"].items())
    assert all(data.any() for _, (_, data) in residuals)
    return digest_of(data for _, (_, data) in residuals)


def digest_of(tensors):
    numbers = b"".join(each.detach().numpy().tobytes() for each in tensors)
    return hashlib.sha256(numbers).hexdigest()[:8]


@hvd.elastic.run
def train(state):
    fail_at("early")
    if how == "between":
        launched.fill_environment()  # the last that needs all ranks before the group
    fail_at("between")
    dist.init_process_group("perseus")
    try:
        take_steps(state)
    except BaseException:
        if how == "tidy":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def take_steps(state):
    global committed
    assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
    assert int(os.environ["LOCAL_RANK"]) == hvd.local_rank()
    parallel = DistributedDataParallel(state.model)
    print(f"enter {hvd.rank()} {hvd.size()} {state.step} {os.getpid()}", flush=True)
    assert held(parallel) == committed
    if hvd.size() == 3 and failed.exists():
        state.taken_in = max(state.taken_in, state.step)
    first, fresh = state.step, not failed.exists()
    # After the last rank has come, all train for as many steps again.
    while state.step < STEPS or state.taken_in < 0 or state.step < state.taken_in + STEPS:
        generator = torch.Generator().manual_seed(hvd.rank() * 1000 + state.step)
        optimizer.zero_grad()
        loss = parallel(torch.rand(8, 40, generator=generator)).square().mean()
        if state.step == 3:
            fail_at("killed", "tidy")
        # Where the others wait, with a wrapper that expects gradients.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == hvd.size()
        loss.backward()
        if how == "raises" and fresh and state.step == 3:
            assert held(parallel) != committed
            fail_at("raises")
            dist.all_reduce(total)
        optimizer.step()
        state.step += 1
        committed = held(parallel)
        # The first step of a world sends what is held for owners of another one.
        assert committed != "nothing" or state.step == first + 1
        state.commit()


def fail_at(*places):
    if how not in places or hvd.rank() != 1 or failed.exists():
        return
    failed.touch()
    if how == "raises":
        raise hvd.HorovodInternalError("failing on purpose")
    os.kill(os.getpid(), signal.SIGKILL)


train(state)
moments = [value for each in optimizer.state.values() for value in each.values()]
digest = digest_of([*model.parameters(), *moments])
print(f"finished {hvd.rank()} {state.step} {digest}", flush=True)
hvd.shutdown()
