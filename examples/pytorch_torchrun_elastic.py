"""Trains on as many hosts as there are: torchrun restarts the ranks when one comes or goes.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun: a new host waits in vain otherwise
    torchrun --nnodes 1:4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        pytorch_torchrun_elastic.py FOLDER

Ranks go on from the checkpoint in FOLDER, which all hosts see. Only the first import is new.
"""

import sys
import time
from pathlib import Path

import perseus  # isort: skip  # noqa: F401 - process groups run on Perseus from here on
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 40


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint = Path(sys.argv[1]) / "checkpoint"
    checkpoint.parent.mkdir(exist_ok=True)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if rank == 0:
        print(f"step {first}: {size} ranks, backend {dist.get_backend()}", flush=True)

    def loss_of(step):
        # The batch of a step is the same however many ranks share it.
        numbers = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))[rank::size]
        return (model(numbers) - numbers.sum(1, keepdim=True)).square().mean()

    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
        time.sleep(0.25)  # as if it were work
        if rank == 0:
            state = {"step": step + 1, "model": model.state_dict()}
            torch.save(state | {"optimizer": optimizer.state_dict()}, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
    with torch.no_grad():
        loss = loss_of(STEPS - 1)
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"finished with {size} ranks, loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
