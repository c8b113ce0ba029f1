"""What test_torch_gpu.py has its ranks do: hvd's training on a device gives a CPU's bits.

Each rank counts as a host of its own, so codecs act. Gradients are small binary fractions, and so
is the learning rate: the arithmetic of optimizers is exact, on whatever device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(
    LIGHT_2D_ALLREDUCE="1", LIGHT_INTRA_SIZE="1", LIGHT_TOPK_THRESHOLD="0",
    LIGHT_TOPK_WARMUP_STEPS="0", PERSEUS_POWERSGD_WARMUP_STEPS="0",
)  # fmt: skip

import torch

import perseus.torch as hvd
from perseus.torch.elastic import TorchState

DEVICE = torch.device(sys.argv[1])
HOST = torch.device("cpu")
SHAPES = ((300, 40), (40,), (7, 5, 3), (20_000,), ())
STEPS = 6

Training = Callable[[torch.device, str], list[torch.Tensor]]


def gradients_of(step: int) -> list[torch.Tensor]:
    """Differ per rank, step and index."""
    start = 3 * hvd.rank() + 5 * step
    return [
        (((torch.arange(torch.Size(shape).numel()) * 7 + start) % 33 - 16) / 64.0).reshape(shape)
        for shape in SHAPES
    ]


def trained(
    device: torch.device, name: str, wrap: Callable[..., Any], steps: int = STEPS
) -> Iterator[list[torch.Tensor]]:
    """Train with the gradients of gradients_of(); yield gradients and parameters of every step."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    named = [(f"{name}.{i}", p) for i, p in enumerate(parameters)]
    optimizer = wrap(torch.optim.SGD(parameters, lr=0.125), named)
    for step in range(steps):
        optimizer.zero_grad()
        given = [g.to(device) for g in gradients_of(step)]
        sum((p * g).sum() for p, g in zip(parameters, given, strict=True)).backward()
        optimizer.synchronize()
        found = [p.grad.clone() for p in parameters]
        with optimizer.skip_synchronize():
            optimizer.step()
        yield [*found, *(p.detach().clone() for p in parameters)]
    hvd.synchronize_parameters()
    yield [p.detach().clone() for p in parameters]


def check_alike(name: str, wrap: Callable[..., Any]) -> None:
    """Both devices give the same bits in every step: names, too, which PowerSGD's start is of."""
    pairs = zip(trained(HOST, name, wrap), trained(DEVICE, name, wrap), strict=True)
    for step, (expected, got) in enumerate(pairs):
        for tensor, wanted in zip(got, expected, strict=True):
            assert tensor.device.type == DEVICE.type
            assert torch.equal(tensor.cpu(), wanted), (name, step, tensor, wanted)


def check_codecs() -> None:
    for name in (
        "none", "fp16", "bf16", "int8", "int4", "int2", "lossless",
    ):  # fmt: skip
        compression = getattr(hvd.Compression, name)
        check_alike(name, lambda o, n, c=compression: hvd.DistributedOptimizer(o, n, compression=c))
    for name, compression in (
        ("topk", hvd.Compression.topk(0.1)),
        ("powersgd", hvd.Compression.powersgd(2)),
        ("rotate", hvd.Compression.rotate(2)),
    ):
        check_alike(name, lambda o, n, c=compression: hvd.DistributedOptimizer(o, n, compression=c))


def check_forms_of_the_optimizer() -> None:
    check_alike("sum", lambda o, n: hvd.DistributedOptimizer(o, n, op=hvd.Sum))
    check_alike("groups", lambda o, n: hvd.DistributedOptimizer(o, n, groups=2))
    check_alike(
        "predivide", lambda o, n: hvd.DistributedOptimizer(o, n, gradient_predivide_factor=2.0)
    )
    check_alike("local", lambda o, n: hvd.LocalSGD(o, n, every=2))
    check_alike("outer", lambda o, n: hvd.DiLoCo(o, n, every=2, fragments=1))


def check_adasum() -> None:
    own = (torch.arange(1000.0) * (hvd.rank() + 1)) % 17
    expected = hvd.allreduce(own, name="adasum.cpu", op=hvd.Adasum)
    got = hvd.allreduce(own.to(DEVICE), name="adasum.device", op=hvd.Adasum)
    assert torch.equal(got.cpu(), expected)


def check_sparse_gradients() -> None:
    results = []
    for device in (HOST, DEVICE):
        torch.manual_seed(0)
        table = torch.nn.Embedding(50, 4, sparse=True).to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.125),
            table.named_parameters(f"s.{device.type}"),
        )
        rows = torch.tensor([1, 4, 4, 9 + hvd.rank()], device=device)
        table(rows).sum().backward()
        optimizer.step()
        results.append(table.weight.detach().cpu())
    assert torch.equal(*results)


def check_batch_normalisation() -> None:
    results = []
    for device in (HOST, DEVICE):
        layer = hvd.SyncBatchNorm(6).to(device)
        torch.manual_seed(hvd.rank())
        values = torch.randn(5 + hvd.rank(), 6, 4).to(device).requires_grad_()
        output = layer(values)
        (output * torch.arange(4.0, device=device)).sum().backward()
        assert values.grad is not None and layer.weight.grad is not None
        found = (output, values.grad, layer.weight.grad, layer.running_mean, layer.running_var)
        results.append([tensor.detach().cpu() for tensor in found])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def check_derivatives() -> None:
    """Collectives as nodes of the graph."""
    for root in range(hvd.size()):
        results = []
        for device in (HOST, DEVICE):
            own = torch.arange(6.0, device=device) + hvd.rank()
            own.requires_grad_()
            parts = (
                hvd.broadcast(own * 2, root, name=f"b.{device.type}"),
                hvd.allreduce(own * 3, name=f"r.{device.type}"),
                hvd.allgather(own * 4, name=f"g.{device.type}"),
                hvd.alltoall(own * 5, name=f"t.{device.type}"),
                hvd.reducescatter(own * 6, name=f"s.{device.type}"),
            )
            sum((part * (hvd.rank() + 1)).sum() for part in parts).backward()
            assert own.grad is not None and own.grad.device.type == device.type
            results.append(own.grad.cpu())
        assert torch.equal(*results)


def check_states_travel() -> None:
    """Optimizers with scalars in host memory, elastic states, and objects that hold tensors."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 3).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(hvd.rank() + 1):
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    held = [
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    for other in hvd.allgather_object([tensor.cpu() for tensor in held]):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(other, held, strict=True))
    state = TorchState(model, optimizer, epoch=hvd.rank())
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert torch.equal(model.weight, before)
    state.sync()
    assert state.epoch == 0
    sent = hvd.broadcast_object({"w": before if hvd.rank() == 0 else None}, root_rank=0)
    assert torch.equal(sent["w"].cpu(), before.cpu())


def check_join() -> None:
    """The ranks that are left go on with this one's zeros."""
    for step in range(3 + 2 * hvd.rank()):
        own = torch.full((1000,), 1.0 + hvd.rank(), device=DEVICE)
        total = hvd.allreduce(own, name=f"join.{step}", op=hvd.Sum)
        here = [rank for rank in range(hvd.size()) if step < 3 + 2 * rank]
        assert torch.equal(total.cpu(), torch.full((1000,), sum(1.0 + rank for rank in here)))
    assert hvd.join() == hvd.size() - 1


def main() -> None:
    """Every check, on this rank."""
    hvd.init()
    checks: list[Callable[[], None]] = [
        check_codecs, check_forms_of_the_optimizer, check_adasum, check_sparse_gradients,
        check_batch_normalisation, check_derivatives, check_states_travel, check_join,
    ]  # fmt: skip
    for check in checks:
        check()
    print(f"rank {hvd.rank()} of {hvd.size()} has checked everything on {DEVICE}")
    hvd.shutdown()


main()
