"""PERSEUS_PARAMETER_CHECK_N_STEPS, and the warning about an optimizer that nobody wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from patterns import assert_job_usable, raised, world_with
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import perseus.torch.horovod as hvd
from perseus.errors import MismatchError


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _wrapped(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    optimizer.zero_grad()
    model(torch.rand(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def _every(steps: int) -> dict[str, object]:
    return {"PERSEUS_PARAMETER_CHECK_N_STEPS": steps}


def _on_last(change: Callable[[], object]) -> None:
    if hvd.rank() == hvd.size() - 1:
        with torch.no_grad():
            change()


def _ranks(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def check_the_first_parameter_that_differs_is_named_on_all_ranks() -> None:
    for op in (hvd.Average, hvd.Adasum):
        with world_with(**_every(2)):
            _find_a_difference(op)


def _find_a_difference(op: int) -> None:
    model = _model()
    optimizer = _wrapped(model, op=op)
    _step(model, optimizer, 0)
    _on_last(lambda: model[2].weight[1, 2].add_(1e-6))
    _step(model, optimizer, 1)
    message = raised(MismatchError, lambda: _step(model, optimizer, 2))
    assert "after 2 steps the parameter 2.weight is not the same" in message, message
    last = hvd.size() - 1
    assert f" on {_ranks(0, last - 1)}, hash " in message, message
    assert f" on rank {last}); of 4 parameters" in message, message
    assert_job_usable()


def check_equal_parameters_pass_at_any_interval() -> None:
    for steps in (1, 3):
        with world_with(**_every(steps)):
            model = _model()
            optimizer = _wrapped(model)
            for step in range(7):
                _step(model, optimizer, step)


def check_it_is_off_by_default() -> None:
    model = _model()
    _on_last(lambda: model[0].bias[0].add_(1))
    optimizer = _wrapped(model)
    for step in range(3):
        _step(model, optimizer, step)


def check_it_goes_with_ranks_that_join() -> None:
    """None is due for those that still train, and all count alike afterwards."""
    with world_with(**_every(2)):
        model = _model()
        optimizer = _wrapped(model)
        for step in range(3 if hvd.rank() == 0 else 6):
            _step(model, optimizer, step)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        for step in range(3):
            _step(model, optimizer, step)
        _on_last(lambda: model[0].bias[0].add_(1))
        _step(model, optimizer, 3)
        message = raised(MismatchError, lambda: _step(model, optimizer, 4))
        assert "after 4 steps the parameter 0.bias is not the same" in message, message
        assert_job_usable()


def check_every_bit_counts_whatever_the_layout() -> None:
    with world_with(**_every(1)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            values = torch.arange(48.0).reshape(2, 3, 2, 4).to(dtype)
            layout = torch.channels_last if hvd.rank() % 2 else torch.contiguous_format
            parameter = nn.Parameter(values.to(memory_format=layout), requires_grad=False)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
            for _ in range(2):
                optimizer.step()
            _on_last(lambda p=parameter: p[0, 0, 0, 0].copy_(torch.tensor(-0.0)))
            message = raised(MismatchError, optimizer.step)
            assert "after 2 steps" in message, message
            assert "of 1 parameters 1 differs" in message, message


def check_another_number_of_parameters_is_named() -> None:
    with world_with(**_every(1)):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        frozen = parameters[1].requires_grad_(False)
        given = parameters if hvd.rank() == 0 else [*parameters, frozen.clone()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(given, lr=0.1))
        optimizer.step()
        message = raised(MismatchError, optimizer.step)
        others = _ranks(1, hvd.size() - 1)
        assert f"number of parameters differs: 2 on rank 0, 3 on {others}" in message, message


def _warnings_of(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(entry.message) for entry in caught if "without averaging" in str(entry.message)]


def check_an_optimizer_that_nobody_wrapped_is_warned_of_once() -> None:
    model = _model()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.broadcast_object({"epoch": 3}, 0)

    found = _warnings_of(lambda: [_step(model, optimizer, step) for step in range(4)] and None)
    assert len(found) == (hvd.rank() == 0), found
    assert all("hvd.DistributedOptimizer(optimizer" in message for message in found)


def check_who_averages_is_not_warned() -> None:
    def by_hand(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = hvd.allreduce(torch.ones_like(parameter), name=f"{step}.{index}")
            optimizer.step()

    def wrapped(model: nn.Module) -> None:
        optimizer = _wrapped(model)
        for step in range(3):
            _step(model, optimizer, step)

    for train in (by_hand, wrapped):
        model = _model()
        hvd.broadcast_parameters(model.state_dict(), 0)
        assert not _warnings_of(lambda t=train, m=model: t(m))


def check_other_hooks_after_steps_are_called_as_well() -> None:
    model = _model()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = _wrapped(model)
    called: list[int] = []
    others = [
        register_optimizer_step_post_hook(lambda *_, n=number: called.append(n))
        for number in range(2)
    ]
    try:
        for step in range(3):
            _step(model, optimizer, step)
    finally:
        for other in others:
            other.remove()
    assert called == [0, 1] * 3, called
