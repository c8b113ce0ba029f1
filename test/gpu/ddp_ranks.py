"""What test_torch_gpu.py has ranks of torch.distributed do: the backend gives a CPU's bits.

Every collective, awaited on a stream of its own, by a future and not at all, then training.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.distributed

DEVICE = torch.device(sys.argv[1])
ON_GPU = DEVICE.type == "cuda"
COUNT = 200_001


def values_of(rank: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Differ per rank and index."""
    return ((torch.arange(count) * 7 + rank * 3) % 11).to(dtype)


def late(values: torch.Tensor) -> torch.Tensor:
    """The values on the device, where they are there only after a long computation."""
    size = 2000 if ON_GPU else 20  # a CPU computes at once
    large = torch.ones(size, size, device=DEVICE)
    for _ in range(20):
        large = large @ large / size
    return values.to(DEVICE) + (large[0, 0] - 1).to(values.dtype)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == DEVICE.type
    assert torch.equal(got.cpu(), expected), (got, expected)


def everyone() -> list[torch.Tensor]:
    return [values_of(rank) for rank in range(dist.get_world_size())]


def total() -> torch.Tensor:
    return torch.stack(everyone()).sum(0)


def check_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = values_of(rank)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        tensor = late(values_of(rank, 1000, dtype))
        dist.all_reduce(tensor)
        same_bits(
            tensor, torch.stack([values_of(r, 1000, dtype) for r in range(size)]).sum(0).to(dtype)
        )
    tensor = late(own)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    same_bits(tensor, torch.stack(everyone()).amax(0))
    tensor = late(own).to(torch.int32)
    dist.all_reduce(tensor, op=dist.ReduceOp.BXOR)
    expected = values_of(0).int()
    for other in range(1, size):
        expected ^= values_of(other).int()
    same_bits(tensor, expected)
    tensor = late(own)
    dist.broadcast(tensor, size - 1)
    same_bits(tensor, values_of(size - 1))
    tensor = late(own)
    dist.reduce(tensor, 0)
    same_bits(tensor, total() if rank == 0 else own)
    parts = [torch.empty(COUNT, device=DEVICE) for _ in range(size)]
    dist.all_gather(parts, late(own))
    same_bits(torch.stack(parts), torch.stack(everyone()))
    joined = torch.empty(size * COUNT, device=DEVICE)
    dist.all_gather_into_tensor(joined, late(own))
    same_bits(joined, torch.cat(everyone()))
    shared = torch.empty(COUNT, device=DEVICE)
    dist.reduce_scatter_tensor(shared, late(own.repeat(size)), op=dist.ReduceOp.AVG)
    same_bits(shared, torch.stack(everyone()).mean(0))
    moved = torch.empty(size * 10, device=DEVICE)
    dist.all_to_all_single(moved, late(own[: size * 10].clone()))
    mine = slice(10 * rank, 10 * rank + 10)
    same_bits(moved, torch.cat([values[mine] for values in everyone()]))
    got = torch.empty(COUNT, device=DEVICE)
    given = [late(values_of(r)) for r in range(size)] if rank == 0 else None
    dist.scatter(got, given)
    same_bits(got, own)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]


def check_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.empty(COUNT, device=DEVICE)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, late(values_of(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    same_bits(got, values_of((rank - 1) % size))


def other_stream() -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else nullcontext()


def check_waiting() -> None:
    """The stream that waits uses the result, whichever thread has settled the operation."""
    own = values_of(dist.get_rank())
    for first in ("wait", "future"):
        tensor = late(own)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        doubled = future.then(lambda found: found.value()[0] * 2)
        if first == "future":
            doubled.wait()
        with other_stream():
            work.wait()
            tripled = tensor * 3
            if ON_GPU:
                torch.cuda.current_stream().synchronize()
        same_bits(tripled, total() * 3)
        same_bits(doubled.wait(), total() * 2)
    parts = [torch.empty(COUNT, device=DEVICE) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, late(own), async_op=True)
    assert work is not None
    work.get_future().wait()
    same_bits(torch.stack(parts) + 1, torch.stack(everyone()) + 1)
    failing = dist.all_reduce(late(own), async_op=True)
    assert failing is not None
    chained = failing.get_future().then(lambda _: 1 / 0)
    try:
        chained.wait()
    except Exception as error:
        assert "division by zero" in str(error)
    else:
        raise AssertionError("a callback's error was lost")


class Parts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.BatchNorm1d(100),
            torch.nn.Linear(100, 1),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).squeeze()


def check_training(hook: str) -> None:
    """Ranks keep the same parameters, and what the loss falls to tells that they train."""
    torch.manual_seed(dist.get_rank())
    devices = [DEVICE.index] if ON_GPU else None
    model = DistributedDataParallel(Parts().to(DEVICE), device_ids=devices, bucket_cap_mb=0.02)
    if hook == "powersgd":
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(60):
        inputs = torch.randn(32, 20).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, parameters)
    for other in everywhere:
        assert torch.equal(other, parameters)
    assert torch.stack(losses[-5:]).mean() < 0.4 * torch.stack(losses[:5]).mean()


def main() -> None:
    """Every check, on this rank."""
    perseus.torch.distributed.init_perseus_training()
    perseus.torch.distributed.register()
    dist.init_process_group("perseus")
    check_collectives()
    check_messages()
    check_waiting()
    dist.barrier(device_ids=[DEVICE.index] if ON_GPU else None)
    check_training("none")
    # Where there is CUDA, torch's hook has it wait for the gradients' device, even for a CPU.
    if ON_GPU or not torch.cuda.is_available():
        check_training("powersgd")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    print(f"rank {rank} of {size} has checked everything on {DEVICE}")


main()
