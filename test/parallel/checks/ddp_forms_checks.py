"""Less usual forms of DDP and FSDP2 on the backend "perseus", against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from c10d_checks import process_group
from ddp_checks import (
    STEPS,
    assert_trained_alike,
    batches,
    details,
    network,
    train,
)
from patterns import assert_same, shared_folder, world_with
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.horovod as hvd


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _sharded(mesh: Any = None) -> torch.nn.Module:
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def _assert_same_everywhere(tensor: torch.Tensor) -> None:
    everywhere = [torch.empty_like(tensor) for _ in range(hvd.size())]
    dist.all_gather(everywhere, tensor.detach().contiguous())
    for other in everywhere:
        assert_same(other, tensor.detach())


def _grid() -> tuple[int, int]:
    """2 x 2 on four ranks; a prime number of them is in one row."""
    return (hvd.size() // 2, 2) if hvd.size() % 2 == 0 else (1, hvd.size())


def check_shards_within_replicas() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", _grid(), mesh_dim_names=("replicate", "shard"))
        model = _sharded(mesh)
        train(model)
        assert_trained_alike(_whole(model))


def check_shards_of_tensor_parallel_layers() -> None:
    """Ranks of a row split the layers and see the same batch; rows see different ones."""
    rows, columns = _grid() if hvd.size() % 2 == 0 else (hvd.size(), 1)
    with process_group():
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("data", "tensor"))
        model = network()
        plan = {str(i): ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(6)}
        parallelize_module(model, mesh["tensor"], plan)
        for layer in model:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        optimizer = _sgd(model)
        reference = network()
        reference_optimizer = _sgd(reference)
        for step in range(STEPS):
            optimizer.zero_grad()
            reference_optimizer.zero_grad()
            model(batches(mesh.get_local_rank("data"))[step]).square().mean().backward()
            for row in range(rows):
                (reference(batches(row)[step]).square().mean() / rows).backward()
            optimizer.step()
            reference_optimizer.step()
        for ours, expected in zip(_whole(model), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-5)
            _assert_same_everywhere(ours)


def _save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def _altered(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def check_distributed_checkpoints() -> None:
    """What shards have saved, replicas load, and the other way round; training goes on alike."""
    with process_group():
        sharded, replicated = _sharded(), DistributedDataParallel(network())
        for form, model in enumerate((sharded, replicated)):
            optimizer = _sgd(model)
            train(model, optimizer)
            place = f"{shared_folder()}/checkpoint{form}"
            _save(model, optimizer, place)
            others = [_altered(_sharded()), _altered(DistributedDataParallel(network()))]
            train(model, optimizer)
            trained = details(model) if model is replicated else _whole(model)
            for other in others:
                other_optimizer = _sgd(other)
                _load(other, other_optimizer, place)
                train(other, other_optimizer)
                loaded = details(other) if other is others[1] else _whole(other)
                for ours, expected in zip(loaded, trained, strict=True):
                    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
                    _assert_same_everywhere(ours)


def check_checkpoints_that_are_saved_in_the_background() -> None:
    with process_group():
        place, name = f"{shared_folder()}/checkpoint", f"of rank {hvd.rank()}"
        saved = torch.arange(5.0) + hvd.rank()
        dcp.async_save({name: saved.clone()}, checkpoint_id=place).result()
        loaded = {name: torch.empty(5)}
        dcp.load(loaded, checkpoint_id=place)
        assert_same(loaded[name], saved)


def check_a_checkpoint_that_rank_0_alone_has() -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with process_group():
        for model, read in ((network(), details), (_sharded(), _whole)):
            _altered(model)
            of_rank_0 = network().state_dict() if hvd.rank() == 0 else {}
            set_model_state_dict(model, of_rank_0, options=options)
            for ours, expected in zip(read(model), details(network()), strict=True):
                assert_same(ours, expected)


def _flattened(model: torch.nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def check_states_of_the_first_fsdp() -> None:
    with process_group():
        model, replicated = _flattened(network()), DistributedDataParallel(network())
        optimizer, reference = _sgd(model), _sgd(replicated)
        train(model, optimizer)
        train(replicated, reference)
        whole = model.state_dict()
        assert_trained_alike(list(whole.values()))
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        for name, parameter in replicated.module.named_parameters():
            momentum = states[name]["momentum_buffer"]
            torch.testing.assert_close(momentum, reference.state[parameter]["momentum_buffer"])
        other = _flattened(_altered(network()))
        in_shards = StateDictType.SHARDED_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, in_shards):
            shards = model.state_dict()
        with FullyShardedDataParallel.state_dict_type(other, in_shards):
            other.load_state_dict(shards)
        for name, loaded in other.state_dict().items():
            assert_same(loaded, whole[name])
            gathered = torch.empty_like(loaded) if hvd.rank() == 0 else None
            shards[name].gather(0, gathered)
            if hvd.rank() == 0:
                assert_same(gathered, loaded)


def check_compiled_models() -> None:
    with process_group():
        torch._dynamo.reset()
        model = DistributedDataParallel(network())
        train(torch.compile(model, backend="aot_eager"))
        assert_trained_alike(details(model))


def check_compiled_models_whose_gradients_are_summed_over_steps() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        found = []
        for is_compiled in (False, True):
            torch._dynamo.reset()
            model = DistributedDataParallel(network())
            train(torch.compile(model, backend="aot_eager") if is_compiled else model)
            found.append(details(model))
        for plain, compiled, initial in zip(*found, details(network()), strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)
            assert not torch.equal(compiled, initial)
            _assert_same_everywhere(compiled)


def check_compiled_functional_collectives() -> None:
    with process_group():

        def combine(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = all_reduce(given * 2, "sum", dist.group.WORLD)
            return total + 1, all_gather_tensor(given + 1, 0, dist.group.WORLD)

        torch._dynamo.reset()
        every = torch.stack([torch.arange(6.0) * (rank + 1) for rank in range(hvd.size())])
        # Without vectors inductor need not try out, by a dozen compilations, which it may use.
        plain = {
            "compile_threads": 1,
            "cpp.vec_isa_ok": False,
            "cpp_cache_precompile_headers": False,
        }
        compiled = torch.compile(combine, fullgraph=True, options=plain)
        for _ in range(2):
            total, gathered = compiled(every[hvd.rank()])
            assert_same(total, (every * 2).sum(0) + 1)
            assert_same(gathered, (every + 1).flatten())


def check_autocast() -> None:
    with process_group():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(batches(0)[0]).dtype == torch.bfloat16
            train(model)
        assert_trained_alike(details(model), tolerance=1e-2)
        assert details(model)[0].dtype == torch.float32


def check_delayed_all_reduce() -> None:
    with process_group():
        for first in (2, 6):
            model = network()
            # The first layer's gradient is the last.
            replicated = DistributedDataParallel(
                model,
                delay_all_reduce_named_params=list(model.named_parameters())[first:],
                param_to_hook_all_reduce=model[0].weight,
            )
            train(replicated)
            assert_trained_alike(details(replicated))


def check_all_reduces_that_are_all_delayed() -> None:
    with process_group():
        trained = network()
        identity = torch.nn.PReLU(init=1.0).requires_grad_(False)  # torch wants one to reduce
        model = torch.nn.Sequential(trained, identity)
        delayed = [(f"0.{name}", parameter) for name, parameter in trained.named_parameters()]
        replicated = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=trained[0].weight,
        )
        replicated._lazy_init_ran = True  # torch's __init__ returns before it sets this
        replicated(batches(hvd.rank())[0]).square().mean().backward()
        reference = network()
        for rank in range(hvd.size()):
            (reference(batches(rank)[0]).square().mean() / hvd.size()).backward()
        ours, expected = trained[-1].weight.grad, reference[-1].weight.grad
        torch.testing.assert_close(ours, expected)
        _assert_same_everywhere(ours)


def check_the_reducer_in_python() -> None:
    with process_group(), torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(network())
        train(model)
        assert_trained_alike(details(model))


def _normalised() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 1), torch.nn.BatchNorm1d(4), torch.nn.Conv1d(4, 2, 1)
    )


def _images(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 3, 5, generator=generator) * (rank + 1) + rank


def check_buffers_are_those_of_rank_0() -> None:
    with process_group():
        for broadcast in (True, False):
            model = DistributedDataParallel(_normalised(), broadcast_buffers=broadcast)
            for step in range(2):
                model(_images(hvd.rank(), step)).sum().backward()
            model.eval()
            if broadcast:
                model.train()
                first, second = _normalised(), _normalised()
                for step in range(2):
                    # Rank 0's buffers were there before this rank's second batch.
                    first(_images(0, step))
                second(_images(0, 0))
                second(_images(hvd.rank(), 1))
                assert_same(model.module[1].running_mean, second[1].running_mean)
            else:
                own = _normalised()
                for step in range(2):
                    own(_images(hvd.rank(), step))
                assert_same(model.module[1].running_mean, own[1].running_mean)


def check_sync_batch_norm_on_cpu() -> None:
    """Under DDP, against plain batch normalisation of the joined batch in one process."""
    with process_group():
        synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(_normalised())
        assert type(synced[1]) is torch.nn.SyncBatchNorm
        model, reference = DistributedDataParallel(synced), _normalised()
        ours, theirs = _sgd(model), _sgd(reference)
        for step in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            model(_images(hvd.rank(), step)).square().mean().backward()
            joined = torch.cat([_images(rank, step) for rank in range(hvd.size())])
            reference(joined).square().mean().backward()
            ours.step()
            theirs.step()
        for (name, value), expected in zip(
            synced.state_dict().items(), reference.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)
            _assert_same_everywhere(value)
        model.eval()
        reference.eval()
        own = _images(hvd.rank(), 9)
        torch.testing.assert_close(model(own), reference(own), rtol=1e-4, atol=1e-4)


def check_sync_batch_norm_of_a_group() -> None:
    """Ranks outside of it do not count, and one rank alone is plain batch normalisation."""
    with process_group():
        group = dist.new_group([0, 1])
        single = [dist.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
        mine = _images(hvd.rank())
        if hvd.rank() < 2:
            layer = torch.nn.SyncBatchNorm(3, process_group=group)
            joined = torch.nn.BatchNorm1d(3)(torch.cat([_images(0), _images(1)]))
            torch.testing.assert_close(
                layer(mine), joined.split(3)[hvd.rank()], rtol=1e-4, atol=1e-5
            )
        own = torch.nn.SyncBatchNorm(3, process_group=single)
        assert_same(own(mine), torch.nn.BatchNorm1d(3)(mine))
