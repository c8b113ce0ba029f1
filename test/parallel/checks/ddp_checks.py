"""DistributedDataParallel, FSDP2, ZeRO and DTensor on the backend "perseus"."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_checks import process_group
from patterns import assert_same
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.horovod as hvd

WIDTH, LAYERS, STEPS = 64, 6, 4


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(STEPS)]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in batches(hvd.rank()):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def alone() -> list[torch.Tensor]:
    """The parameters after training on the batches of all ranks in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batches(rank)[step]).square().mean() for rank in range(hvd.size())]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_trained_alike(parameters: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    """The same bits on all ranks, and what one process would have, within float tolerance."""
    for parameter, expected in zip(parameters, alone(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=tolerance, atol=tolerance)
        everywhere = [torch.empty_like(parameter) for _ in range(hvd.size())]
        dist.all_gather(everywhere, parameter.contiguous())
        for other in everywhere:
            assert_same(other, parameter)


def details(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def check_ddp_in_every_form() -> None:
    forms: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 0.02},
        {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.02, "static_graph": True},
        {"bucket_cap_mb": 0.02, "find_unused_parameters": True},
    ]
    with process_group():
        for form in forms:
            model = DistributedDataParallel(network(), **form)
            train(model)
            assert_trained_alike(details(model))


def check_ddp_without_synchronisation() -> None:
    with process_group():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        first, second = batches(hvd.rank())[:2]
        with model.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        reference = network()
        for rank in range(hvd.size()):
            for batch in batches(rank)[:2]:
                (reference(batch).square().mean() / hvd.size()).backward()
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)


def check_parameters_that_only_some_ranks_use() -> None:
    with process_group():
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(hvd.size())])

        class Branches(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, given: torch.Tensor) -> torch.Tensor:
                return self.layers[hvd.rank()](given)

        model = DistributedDataParallel(Branches(), find_unused_parameters=True)
        model(torch.full((2, 4), hvd.rank() + 1.0)).sum().backward()
        for rank, layer in enumerate(layers):
            assert_same(layer.bias.grad, torch.full((4,), 2.0) / hvd.size())
            expected = torch.full((4, 4), 2.0 * (rank + 1)) / hvd.size()
            torch.testing.assert_close(layer.weight.grad, expected)


def _hooked(hook: Callable[..., Any], state: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    model.register_comm_hook(state, hook)
    return model


def check_torchs_own_hooks() -> None:
    with process_group():
        model = _hooked(default_hooks.allreduce_hook, None)
        train(model)
        assert_trained_alike(details(model))
        model = _hooked(default_hooks.fp16_compress_hook, None)
        train(model)
        assert_trained_alike(details(model), tolerance=1e-3)


def check_torchs_built_in_hooks() -> None:
    """Also of a model that is not on the default group. A copy has none, as on gloo."""
    kinds = dist.BuiltinCommHookType
    with process_group():
        for group, kind, tolerance in (
            (None, kinds.ALLREDUCE, 1e-6),
            (dist.new_group(), kinds.FP16_COMPRESS, 1e-3),
        ):
            model = DistributedDataParallel(network(), process_group=group)
            model._register_builtin_comm_hook(kind)
            if group is None:  # torch copies models on the default group alone
                copied = copy.deepcopy(model)
                train(copied)
                assert_trained_alike(details(copied))
            train(model)
            assert_trained_alike(details(model), tolerance)
            with pytest.raises(RuntimeError, match="only be called once"):
                model._register_builtin_comm_hook(kind)


def check_powersgd_in_several_buckets() -> None:
    """Its callbacks start collectives, and on gloo ranks start them in different orders."""
    with process_group():
        for rank in (1, 2, WIDTH):
            state = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=rank,
                start_powerSGD_iter=2,
                min_compression_rate=0.5,
            )
            model = _hooked(powerSGD_hook.powerSGD_hook, state)
            train(model)
            if rank == WIDTH:  # nothing is left out
                assert_trained_alike(details(model), tolerance=1e-3)


def check_uneven_numbers_of_batches() -> None:
    with process_group():
        for form in ({}, {"find_unused_parameters": True}):
            model = DistributedDataParallel(network(), **form)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with Join([model]):
                for _ in range(2 + hvd.rank()):
                    optimizer.zero_grad()
                    model(torch.ones(2, WIDTH)).square().mean().backward()
                    optimizer.step()
            for parameter in details(model):
                everywhere = [torch.empty_like(parameter) for _ in range(hvd.size())]
                dist.all_gather(everywhere, parameter)
                assert_same(everywhere[0], everywhere[-1])


def check_sharded_training() -> None:
    with process_group():
        model = network()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        train(model)
        assert_trained_alike([parameter.full_tensor().detach() for parameter in model.parameters()])
        replicated = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(
            replicated.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9
        )
        train(replicated, optimizer)
        assert_trained_alike(details(replicated))


def check_sharded_optimizer_of_channels_last_weights() -> None:
    """ZeRO broadcasts the parameters as they lie."""
    with process_group():
        torch.manual_seed(3)
        network = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model = DistributedDataParallel(network)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(hvd.rank()))
        for _ in range(2):
            optimizer.zero_grad()
            model(images.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        for parameter in details(model):
            everywhere = [torch.empty_like(parameter) for _ in range(hvd.size())]
            dist.all_gather(everywhere, parameter)
            assert_same(everywhere[0], everywhere[-1])


def check_distributed_tensors() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (hvd.size(),))
        whole = torch.arange(12.0 * hvd.size()).view(-1, 3)
        shards = distribute_tensor(whole, mesh, [Shard(0)])
        assert_same(shards.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert_same((shards * 2).sum().full_tensor(), whole.sum() * 2)


def check_a_failed_hook_is_an_error() -> None:
    with process_group():

        def refuse(_, bucket):  # DDP looks at annotations, and wants classes there
            def fail(done: torch.futures.Future) -> torch.Tensor:
                raise ArithmeticError(f"bucket {bucket.index()}")

            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

        model = DistributedDataParallel(network())
        model.register_comm_hook(None, refuse)
        with pytest.raises(RuntimeError, match="bucket 0"):
            train(model)


def check_a_group_that_has_ended_fails_the_backward_pass() -> None:
    with process_group():
        for hook in (None, default_hooks.allreduce_hook):
            group = dist.new_group()
            model = DistributedDataParallel(network(), process_group=group)
            if hook is not None:
                model.register_comm_hook(group, hook)
            train(model)
            dist.barrier()
            group.abort()
            # torch's hook has a future's error taken for a tensor.
            kind = dist.DistBackendError if hook is None else RuntimeError
            with pytest.raises(kind, match=r"called destroy_process_group\(\) or ended"):
                train(model)
