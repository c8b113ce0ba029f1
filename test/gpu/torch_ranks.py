"""What test_torch_gpu.py has its ranks do: PyTorch's tensors on a device give a CPU's bits."""

from __future__ import annotations

import sys
from typing import Any

import torch

import perseus.torch as hvd

DEVICE = torch.device(sys.argv[1])
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64,
)  # fmt: skip
SHAPES = ((), (1,), (1000,), (33, 7), (300_001,))


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Differ per rank and index."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 11).to(dtype).reshape(shape)


def late(values: torch.Tensor) -> torch.Tensor:
    """The values on the device, where they are there only after a long computation."""
    size = 2000 if DEVICE.type == "cuda" else 20  # a CPU computes at once
    large = torch.ones(size, size, device=DEVICE)
    for _ in range(20):
        large = large @ large / size
    return values.to(DEVICE) + (large[0, 0] - 1).to(values.dtype)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == DEVICE.type
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got.cpu(), expected), (got, expected)


def check_reductions() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{dtype}.{shape}"
            own = values_of(hvd.rank(), shape, dtype)
            expected = hvd.allreduce(own, name=f"cpu.{name}", op=hvd.Sum)
            same_bits(hvd.allreduce(late(own), name=name, op=hvd.Sum), expected)
            in_place = late(own)
            hvd.allreduce_(in_place, name=name, op=hvd.Sum)
            same_bits(in_place + in_place, expected + expected)


def check_many_at_once() -> None:
    tensors = [values_of(hvd.rank() + i, (100 * i + 1,), torch.float32) for i in range(50)]
    handles = [
        hvd.allreduce_async_(late(t), name=f"many{i}", op=hvd.Sum) for i, t in enumerate(tensors)
    ]
    results = [hvd.synchronize(handle) * 2 for handle in handles]
    for i, result in enumerate(results):
        sums = [values_of(r + i, (100 * i + 1,), torch.float32) for r in range(hvd.size())]
        same_bits(result, 2 * torch.stack(sums).sum(0))


def check_streams() -> None:
    """A stream of the script's own computes the tensor, and another one uses the result."""
    if DEVICE.type != "cuda":
        return
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    own = values_of(hvd.rank(), (200_000,), torch.float32)
    with torch.cuda.stream(first):
        handle = hvd.allreduce_async_(late(own), name="streams", op=hvd.Sum)
    with torch.cuda.stream(second):
        result = hvd.synchronize(handle) * 3
    second.synchronize()
    sums = [values_of(r, (200_000,), torch.float32) for r in range(hvd.size())]
    same_bits(result, 3 * torch.stack(sums).sum(0))


def check_memory_of_results() -> None:
    """A result that another stream still reads is not given to the next operation's result."""
    if DEVICE.type != "cuda":
        return
    side = torch.cuda.Stream()
    own = [values_of(hvd.rank() + i, (300_000,), torch.float32) for i in range(6)]
    torch.cuda.synchronize()
    read = []
    for i, tensor in enumerate(own):
        with torch.cuda.stream(side):
            handle = hvd.allreduce_async(tensor, name=f"memory{i}", op=hvd.Sum)
        result = hvd.synchronize(handle)
        torch.cuda._sleep(20_000_000)
        read.append(result + 0)
        del result, handle
    for i, copy in enumerate(read):
        sums = [values_of(r + i, (300_000,), torch.float32) for r in range(hvd.size())]
        same_bits(copy, torch.stack(sums).sum(0))


def check_other_collectives() -> None:
    own = values_of(hvd.rank(), (hvd.rank() + 2, 3), torch.float32)
    parts = [values_of(r, (r + 2, 3), torch.float32) for r in range(hvd.size())]
    same_bits(hvd.allgather(late(own), name="uneven"), torch.cat(parts))
    own = values_of(hvd.rank(), (4, 3), torch.int64)
    parts = [values_of(r, (4, 3), torch.int64) for r in range(hvd.size())]
    same_bits(hvd.allgather(late(own), name="even"), torch.cat(parts))
    same_bits(hvd.broadcast(late(own), hvd.size() - 1, name="start"), parts[-1])
    own = values_of(hvd.rank(), (hvd.size() * 2, 5), torch.float32)
    parts = [values_of(r, (hvd.size() * 2, 5), torch.float32) for r in range(hvd.size())]
    mine = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    same_bits(hvd.reducescatter(late(own), op=hvd.Sum), torch.stack(parts).sum(0)[mine])
    same_bits(hvd.alltoall(late(own)), torch.cat([part[mine] for part in parts]))
    splits = torch.full((hvd.size(),), 2, dtype=torch.int32, device=DEVICE)
    handle = hvd.alltoall_async(late(own), splits)
    for output, received in (hvd.alltoall(late(own), splits), hvd.synchronize(handle)):
        same_bits(output, torch.cat([part[mine] for part in parts]))
        same_bits(received, splits.cpu())
    grouped = [late(t) for t in (own, own[0], own[:, 0].contiguous())]
    for got, plain in zip(
        hvd.grouped_allreduce(grouped, op=hvd.Average),
        [
            torch.stack(parts).mean(0),
            torch.stack(parts).mean(0)[0],
            torch.stack(parts).mean(0)[:, 0],
        ],
        strict=True,
    ):
        same_bits(got, plain)


def check_training() -> None:
    """Ranks keep the same parameters, and what the loss falls to tells that they train."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 1)
    ).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for _ in range(60):
        inputs = torch.randn(32, 20).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(inputs).squeeze() - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = hvd.allgather(parameters.reshape(1, -1), name="parameters")
    for other in everywhere:
        assert torch.equal(other, parameters)
    assert torch.stack(losses[-5:]).mean() < 0.3 * torch.stack(losses[:5]).mean()


def main() -> None:
    """Every check, on this rank."""
    hvd.init()
    checks: list[Any] = [
        check_reductions, check_many_at_once, check_streams, check_other_collectives,
        check_training,
    ]  # fmt: skip
    for check in checks:
        check()
    print(f"rank {hvd.rank()} of {hvd.size()} has checked everything on {DEVICE}")
    hvd.shutdown()


main()
