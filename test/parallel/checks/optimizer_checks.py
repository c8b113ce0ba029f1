"""DistributedOptimizer: equal to one rank on the global batch, in every mode it offers."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from patterns import assert_job_usable, raised, world_with
from pytorch_mnist import Net
from torch import nn

import perseus.torch.horovod as hvd

BATCH = 6  # images per rank


def _global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    count = BATCH * hvd.size()
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


def _share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]


def _net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def _assert_close(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            mine, right, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def _assert_equal_on_all_ranks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        stacked = hvd.allgather(parameter.detach().contiguous().unsqueeze(0), name=f"equal.{name}")
        assert all(torch.equal(row, stacked[0]) for row in stacked), name


def _compare(
    wrap: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer],
    make: Callable[[nn.Module], torch.optim.Optimizer] = _sgd,
    steps: int = 4,
    channels_last: bool = False,
) -> None:
    """Train on shares with wrap(optimizer), and a copy on the global batch without."""
    model = _net()
    reference = copy.deepcopy(model)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = wrap(make(model), model)
    plain = make(reference)
    for step in range(steps):
        images, labels = _global_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(_share(images)), _share(labels)).backward()
        optimizer.step()
        plain.zero_grad()
        F.cross_entropy(reference(images), labels).backward()
        plain.step()
    _assert_close(model, reference)
    _assert_equal_on_all_ranks(model)


def _named(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def check_equals_one_rank_on_the_global_batch() -> None:
    _compare(_named)


def check_without_names() -> None:
    _compare(lambda optimizer, _: hvd.DistributedOptimizer(optimizer))


def check_adam() -> None:
    _compare(_named, make=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3), steps=3)


def check_channels_last_model() -> None:
    _compare(_named, channels_last=True)


def check_sum_is_size_times_the_mean() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        distributed = not make.plain
        make.plain = True
        lr = 0.1 / hvd.size() if distributed else 0.1
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    make.plain = False
    _compare(lambda o, m: _named(o, m, op=hvd.Sum), make=make)


def check_predivide_factor() -> None:
    for groups in (None, 2):
        _compare(lambda o, m, g=groups: _named(o, m, gradient_predivide_factor=2.0, groups=g))


def check_number_of_groups() -> None:
    for groups in (1, 3, 50):
        _compare(lambda o, m, g=groups: _named(o, m, groups=g))


def check_lists_of_groups() -> None:
    def wrap(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        groups = [[model.conv1.weight, model.fc2.bias], [model.fc1.weight]]
        return _named(optimizer, model, groups=groups)

    _compare(wrap)


def check_old_name_of_groups() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _compare(lambda o, m: _named(o, m, num_groups=2))
    assert any(entry.category is DeprecationWarning for entry in seen)


def check_fp16_compression_is_close() -> None:
    model = _net()
    optimizer = _named(_sgd(model), model, compression=hvd.Compression.fp16)
    images, labels = _global_batch(0)
    F.cross_entropy(model(_share(images)), _share(labels)).backward()
    optimizer.synchronize()
    reference = _net()
    F.cross_entropy(reference(images), labels).backward()
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, right.grad, rtol=5e-3, atol=1e-4)


def check_backward_passes_add_up_before_one_reduction() -> None:
    passes = 3
    model = _net()
    reference = copy.deepcopy(model)
    optimizer = _named(_sgd(model), model, backward_passes_per_step=passes)
    plain = _sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(passes):
            images, labels = _global_batch(step * passes + part)
            F.cross_entropy(model(_share(images)), _share(labels)).backward()
            F.cross_entropy(reference(images), labels).backward()
        optimizer.step()
        plain.step()
    _assert_close(model, reference)
    images, labels = _global_batch(0)
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.zero_grad()
    plain.zero_grad()
    F.cross_entropy(model(_share(images)), _share(labels)).backward()
    F.cross_entropy(reference(images), labels).backward()
    optimizer.step()
    plain.step()
    _assert_close(model, reference)


def check_one_backward_too_many_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = _named(_sgd(model), model)
    model(torch.ones(1, 2)).sum().backward()
    text = raised(AssertionError, lambda: model(torch.ones(1, 2)).sum().backward())
    assert "Gradients were computed more than backward_passes_per_step times" in text
    # Autograd has added to what was being averaged.
    assert "changed in place" in raised(ValueError, optimizer.synchronize)


def check_zero_grad_while_reducing_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = _named(_sgd(model), model)
    model(torch.ones(1, 2)).sum().backward()
    text = raised(AssertionError, optimizer.zero_grad)
    assert "prohibited as it can cause a race condition" in text
    optimizer.step()
    optimizer.zero_grad()


def check_synchronize_clip_step() -> None:
    model = _net()
    reference = copy.deepcopy(model)
    optimizer, plain = _named(_sgd(model), model), _sgd(reference)
    for step in range(3):
        images, labels = _global_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(_share(images)), _share(labels)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        F.cross_entropy(reference(images), labels).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    _assert_close(model, reference)


def check_step_after_synchronize_warns_and_reduces_again() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.tolist() == [[float(hvd.size())] * 3]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert "without optimizer.skip_synchronize()" in str(seen[0].message)
    assert model.weight.grad.tolist() == [[float(hvd.size() ** 2)] * 3]


def check_an_unused_layer_takes_part_with_zeros() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    optimizer = _named(_sgd(model), model)
    # Each rank reaches one of the layers only.
    model[hvd.rank() % 2](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    share = sum(rank % 2 == 0 for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(model[0].weight.grad, torch.full((1, 2), share))
    torch.testing.assert_close(model[1].weight.grad, torch.full((1, 2), 1.0 - share))


def check_closure_runs_after_the_reduction() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = _named(_sgd(model), model)
    (model(torch.ones(1, 2)).sum() * hvd.rank()).backward()
    seen = []

    def closure() -> float:
        seen.append(model.weight.grad[0, 0].item())
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert abs(seen[0] - (hvd.size() - 1) / 2) < 1e-6


def _rows(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(5, 3, generator=generator, dtype=torch.float64)


def _train_by_closures(
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
    passes: int = 1,
    averages: bool = True,
) -> None:
    """Closures that compute gradients of different data, against one rank with all data.

    averages: whether a closure returns the loss of all ranks' data, or that of its own.
    """
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    reference = copy.deepcopy(model)
    optimizer = _named(make(model.parameters()), model, backward_passes_per_step=passes)
    plain = make(reference.parameters())
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(_rows(step, hvd.rank())).square().mean()
            for _ in range(passes):
                (loss / passes).backward(retain_graph=True)
            losses.append(hvd.allreduce(loss.detach()) if averages else loss)
            return losses[-1]

        def on_all_data(step: int = step) -> torch.Tensor:
            plain.zero_grad()
            rows = torch.cat([_rows(step, rank) for rank in range(hvd.size())])
            loss = reference(rows).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        torch.testing.assert_close(loss, plain.step(on_all_data).detach())
        _assert_equal_on_all_ranks(model)
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-8)
    assert not optimizer._reducer.busy()
    assert len(losses) >= steps


def check_a_closure_may_compute_the_gradients() -> None:
    _train_by_closures(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    _train_by_closures(lambda p: torch.optim.AdamW(p, lr=0.01), passes=2)


def check_lbfgs_calls_its_closure_several_times() -> None:
    _train_by_closures(lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4), steps=2)
    # It decides by the loss how often it calls the closure, and how far it goes.
    for averages in (True, False):
        _train_by_closures(
            lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
            steps=2,
            averages=averages,
        )


def check_a_closure_may_reach_no_parameter_on_some_ranks() -> None:
    model = nn.Linear(2, 1, bias=False)
    weight = model.weight.detach().clone()
    optimizer = _named(torch.optim.SGD(model.parameters(), lr=1.0), model)

    def closure() -> None:
        optimizer.zero_grad()
        if hvd.rank() == 0:
            model(torch.ones(1, 2)).sum().backward()

    optimizer.step(closure)
    torch.testing.assert_close(model.weight.detach(), weight - 1 / hvd.size())


def check_what_a_closure_begins_is_reduced_though_the_step_skips_its_own() -> None:
    model = nn.Linear(2, 1, bias=False)
    weight = model.weight.detach().clone()
    optimizer = _named(torch.optim.SGD(model.parameters(), lr=1.0), model)

    def compute(scale: float) -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * scale * hvd.rank()).backward()

    compute(1.0)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step(lambda: compute(3.0))
    torch.testing.assert_close(model.weight.detach(), weight - 3.0 * (hvd.size() - 1) / 2)
    compute(1.0)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), weight - 4.0 * (hvd.size() - 1) / 2)


def check_requires_grad_may_change_between_steps() -> None:
    model = _net()
    optimizer = _named(_sgd(model), model)
    for frozen in (False, True, False):
        model.conv1.weight.requires_grad_(not frozen)
        images, labels = _global_batch(1)
        optimizer.zero_grad()
        F.cross_entropy(model(_share(images)), _share(labels)).backward()
        optimizer.step()
    _assert_equal_on_all_ranks(model)


def check_parameters_may_join_after_wrapping() -> None:
    """By requires_grad_(), and by add_param_group() of the wrapper or of what it wraps."""
    sizes, joins = (3, 4, 5, 6), (0, 1, 2, 3)  # the step that each parameter takes first

    def gradient(rank: int, step: int, number: int) -> torch.Tensor:
        return torch.arange(sizes[number], dtype=torch.float32) * (step + 1) + rank * (number + 1)

    def train(named: bool, passes: int) -> None:
        parameters = [
            nn.Parameter(torch.zeros(size), number != 1) for number, size in enumerate(sizes)
        ]
        plain = torch.optim.SGD(parameters[:2], lr=1.0)
        names = [(f"p{number}", p) for number, p in enumerate(parameters[:3])] if named else None
        optimizer = hvd.DistributedOptimizer(plain, names, backward_passes_per_step=passes)
        for step in range(5):
            if step == 1:
                parameters[1].requires_grad_()
            elif step == 2:
                optimizer.add_param_group({"params": parameters[2], "lr": 0.5})
            elif step == 3:
                plain.add_param_group({"params": parameters[3:]})
            optimizer.zero_grad()
            for _ in range(passes):
                terms = [
                    (p * gradient(hvd.rank(), step, number)).sum()
                    for number, p in enumerate(parameters)
                    if step >= joins[number]
                ]
                sum(terms).backward()
            optimizer.step()
            for number, p in enumerate(parameters):
                total = torch.zeros(sizes[number])
                for earlier in range(joins[number], step + 1):
                    for rank in range(hvd.size()):
                        total += gradient(rank, earlier, number) * passes / hvd.size()
                torch.testing.assert_close(p.detach(), -total * (0.5 if number == 2 else 1.0))

    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=1):
        train(named=True, passes=1)
        train(named=False, passes=2)
    weight, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), compression=hvd.Compression.rotate(2)
    )
    optimizer.add_param_group({"params": late})
    (weight + late).sum().backward()
    message = raised(ValueError, optimizer.step)
    assert "the parameter allreduce.noname.1.0 joined the optimizer" in message


def _step_of_ranks(optimizer: torch.optim.Optimizer, *parameters: nn.Parameter) -> None:
    """Take a step by (the average of) rank + 1, for every parameter."""
    optimizer.zero_grad()
    sum((p * (hvd.rank() + 1)).sum() for p in parameters).backward()
    optimizer.step()


def _assert_taken(steps: int, *parameters: nn.Parameter) -> None:
    for p in parameters:
        assert torch.equal(p.detach(), torch.full_like(p, -steps * (hvd.size() + 1) / 2))


def _zeros(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def _replace_one(**options: Any) -> None:
    first, second = _zeros(2, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), **options)
    _step_of_ranks(optimizer, first, second)
    _assert_taken(1, first, second)
    for steps, size in ((2, 4), (4, 4)):
        (first,) = optimizer.param_groups[0]["params"][:1] = _zeros(size)
        _step_of_ranks(optimizer, first, second)
        _step_of_ranks(optimizer, first, second)
        _assert_taken(2, first)
        _assert_taken(steps + 1, second)


def check_a_parameter_may_take_the_place_of_another() -> None:
    """As one does whose number of rows changes."""
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=1):
        for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}):
            _replace_one(**options)


def check_a_new_rank_knows_only_the_parameters_that_there_are() -> None:
    """As one of an elastic job, which begins when the others have replaced a parameter."""
    first, second = _zeros(2, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    _step_of_ranks(optimizer, first, second)
    (first,) = optimizer.param_groups[0]["params"][:1] = _zeros(4)
    with world_with():
        if hvd.rank() == hvd.size() - 1:
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
        _step_of_ranks(optimizer, first, second)
        _assert_taken(1, first)
        _assert_taken(2, second)


def check_a_parameter_may_go_between_backward_and_step() -> None:
    gone, kept = _zeros(2, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([gone, kept], lr=1.0))
    with world_with():
        ((gone.sum() + kept.sum()) * (hvd.rank() + 1)).backward()
        (new,) = optimizer.param_groups[0]["params"][:1] = _zeros(4)
        optimizer.step()
        _assert_taken(1, kept)
        assert_job_usable()  # nothing is under way
        _step_of_ranks(optimizer, kept, new)
        _assert_taken(2, kept)
        _assert_taken(1, new)


def check_a_parameter_that_has_gone_is_let_go() -> None:
    kept, used_by_one = _zeros(2, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([kept, used_by_one], lr=1.0), groups=1)
    _step_of_ranks(optimizer, kept, used_by_one)
    del optimizer.param_groups[0]["params"][1]
    if hvd.rank() == 0:
        used_by_one.sum().backward()  # which begins its reduction on this rank alone
    _step_of_ranks(optimizer, kept)
    _assert_taken(2, kept)
    reference = weakref.ref(used_by_one)
    del used_by_one
    gc.collect()
    assert reference() is None


def check_a_group_may_take_the_place_of_another() -> None:
    first, gone, *late = _zeros(2, 2, 2, 5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": [gone]}, {"params": [first]}], lr=1.0)
    )
    _step_of_ranks(optimizer, gone, first)
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": late})
    _step_of_ranks(optimizer, first, *late)
    _assert_taken(2, first)
    _assert_taken(1, gone, *late)


def check_two_optimizers_take_turns_with_frozen_parameters() -> None:
    """As adversarial networks are trained: each half learns while the other is frozen."""

    def halves() -> list[nn.Module]:
        torch.manual_seed(8)
        return [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()]

    def train(
        first: nn.Module, second: nn.Module, optimizers: list[torch.optim.Optimizer], share: slice
    ) -> None:
        for step in range(6):
            learns = step % 2
            for half, module in enumerate((first, second)):
                module.requires_grad_(half == learns)
            generator = torch.Generator().manual_seed(step)
            batch = torch.rand(2 * hvd.size(), 3, generator=generator, dtype=torch.float64)
            optimizers[learns].zero_grad()
            (second(first(batch[share])) ** 2).mean().backward()
            optimizers[learns].step()

    mine, reference = halves(), halves()
    wrapped = [
        hvd.DistributedOptimizer(
            _sgd(module), [(f"half{i}.{name}", p) for name, p in module.named_parameters()]
        )
        for i, module in enumerate(mine)
    ]
    train(*mine, wrapped, slice(2 * hvd.rank(), 2 * hvd.rank() + 2))
    train(*reference, [_sgd(module) for module in reference], slice(None))
    for module, right in zip(mine, reference, strict=True):
        _assert_close(module, right)


def check_two_optimizers_side_by_side() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [
        hvd.DistributedOptimizer(
            _sgd(model), [(f"{i}.{n}", p) for n, p in model.named_parameters()]
        )
        for i, model in enumerate((first, second))
    ]
    (first(torch.ones(1, 3)) + second(torch.ones(1, 3)) * hvd.rank()).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    mean = (hvd.size() - 1) / 2
    torch.testing.assert_close(first.bias.grad, torch.ones(2))
    torch.testing.assert_close(second.bias.grad, torch.full((2,), mean))


def check_a_new_optimizer_replaces_the_old_ones_hooks() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = _named(_sgd(model), model, op=hvd.Sum)
    del optimizer
    gc.collect()
    optimizer = _named(_sgd(model), model, op=hvd.Sum)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.grad.tolist() == [[float(hvd.size())] * 3]


def check_sparse_gradients_as_dense() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = _named(
        torch.optim.SGD(model.parameters(), lr=0.1), model, sparse_as_dense=True, op=hvd.Sum
    )
    model(torch.tensor([hvd.rank(), 4])).sum().backward()
    optimizer.synchronize()
    expected = torch.zeros(5, 2)
    expected[: hvd.size()] += 1.0
    expected[4] += hvd.size()
    assert torch.equal(model.weight.grad.to_dense(), expected)


def check_a_mismatched_gradient_ends_the_step_with_an_error_on_all_ranks() -> None:
    rows = 3 if hvd.rank() == 0 else 2
    model = nn.ModuleDict({"good": nn.Linear(2, 2), "bad": nn.Linear(2, rows)})
    optimizer = _named(_sgd(model), model)
    (model["good"](torch.ones(1, 2)).sum() + model["bad"](torch.ones(1, 2)).sum()).backward()
    text = raised(hvd.HorovodInternalError, optimizer.step)
    assert "Mismatched ALLREDUCE tensor shapes" in text
    optimizer.zero_grad()  # nothing is outstanding
    assert_job_usable()
