"""What codecs hold back of DistributedDataParallel's gradients, weighted with learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from ddp_gradient_checks import apart
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.horovod as hvd

SHAPE = (200, 250)
RATES = (0.5, 1.0, 0.25, 0.125)
# The first step's gradients travel before any optimizer has stepped. What is held back of them is
# therefore taken for that of a step with the second one's rate.
WEIGHTS = (1.0, 1.0, 0.25, 0.125)
LOSSY = (
    {"PERSEUS_ALLREDUCE_CODEC": "int8"},
    {
        "LIGHT_TOPK_ALLREDUCE": 1,
        "LIGHT_TOPK_RATIO": 0.01,
        "LIGHT_TOPK_THRESHOLD": 0,
        "LIGHT_TOPK_WARMUP_STEPS": 0,
    },
    {
        "PERSEUS_ALLREDUCE_CODEC": "powersgd",
        "PERSEUS_POWERSGD_RANK": 2,
        "PERSEUS_POWERSGD_WARMUP_STEPS": 0,
    },
)
Parameters = Iterable[torch.Tensor]
Make = Callable[[Parameters], torch.optim.Optimizer]


def _gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHAPE, generator=generator)


def _mean(step: int) -> torch.Tensor:
    return torch.stack([_gradient(rank, step).double() for rank in range(hvd.size())]).mean(dim=0)


class _Given(nn.Module):
    """Two parameters in one bucket, whose gradients are this rank's of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))

    def forward(self, step: int) -> torch.Tensor:
        gradient = _gradient(hvd.rank(), step)
        return (self.first * gradient + self.second * gradient.flip(0)).sum()


class _Sums(NamedTuple):
    """Of the first parameter's results: by how much they and their weighted sum miss the exact."""

    plain: float
    weighted: float


def _train(make: Make, follow: Callable[[torch.optim.Optimizer, int], None]) -> _Sums:
    """Four steps; the last one sends all that is held back.

    follow(optimizer, step) is called after each step and sets the next step's rate.
    """
    model = DistributedDataParallel(_Given())
    optimizer = make(model.parameters())
    plain, weighted = torch.zeros(2, *SHAPE, dtype=torch.float64)
    for step, weight in enumerate(WEIGHTS):
        if step == len(WEIGHTS) - 1:
            model._perseus._group.world.context.flush_residuals()
        model.zero_grad()
        model(step).backward()
        missing = model.module.first.grad.double() - _mean(step)
        plain += missing
        weighted += weight * missing
        optimizer.step()
        follow(optimizer, step)
    return _Sums(plain.abs().max().item(), weighted.abs().max().item())


def _by_hand(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATES[min(step + 1, len(RATES) - 1)]


def _sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATES[0])


def _expect_weighted(sums: _Sums, told: object) -> None:
    assert sums.weighted < 1e-5, (told, sums)
    assert sums.plain > 1e-3, (told, sums)


def _expect_unweighted(sums: _Sums, told: object) -> None:
    assert sums.plain < 1e-4, (told, sums)
    assert sums.weighted > 1e-3, (told, sums)


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    for codec in LOSSY:
        with apart(PERSEUS_ALLREDUCE_DTYPE=1, **codec):
            _expect_weighted(_train(_sgd, _by_hand), codec)


def check_a_scheduler_sets_the_rates() -> None:
    schedulers: dict[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler] = {}

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=True)
        schedulers[optimizer] = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: RATES[min(step, len(RATES) - 1)]
        )
        return optimizer

    with apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        sums = _train(make, lambda optimizer, _: schedulers[optimizer].step())
        _expect_weighted(sums, "scheduler")


def check_rates_that_differ_in_a_bucket() -> None:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        first, second = parameters
        groups = [{"params": [second], "lr": 7.0}, {"params": [first]}]
        return torch.optim.SGD(groups, lr=RATES[0])

    def follow(optimizer: torch.optim.Optimizer, step: int) -> None:
        _by_hand(optimizer, step)
        optimizer.param_groups[0]["lr"] = 7.0

    with apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        _expect_weighted(_train(make, follow), "groups")


def check_only_some_ranks_may_know_the_rates() -> None:
    """As when ranks collect the garbage of another optimizer at different times."""
    for codec in ("int8", "auto"):
        with apart(PERSEUS_ALLREDUCE_CODEC=codec, PERSEUS_LINK_GBIT=0.001):
            model = DistributedDataParallel(_Given())
            optimizer = _sgd(model.parameters())
            for step in range(4):
                model.zero_grad()
                model(step).backward()
                gradient = model.module.first.grad.reshape(1, -1)
                gathered = hvd.allgather(gradient, name=f"grad {step}")
                assert all(torch.equal(row, gathered[0]) for row in gathered)
                if hvd.rank() == 0:
                    optimizer.step()
                _by_hand(optimizer, step)


class _Own(torch.optim.SGD):
    """Perhaps its steps are not proportional to gradients."""


def _replaced(parameters: Parameters) -> torch.optim.Optimizer:
    """Return an optimizer in the place of another one, which somebody still has."""
    parameters = list(parameters)
    optimizer, another = _sgd(parameters), _sgd(parameters)
    another.step()
    optimizer.another = another
    return optimizer


def _sharded(parameters: Parameters) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=RATES[0])


def check_unknown_rates_weigh_nothing() -> None:
    """ZeRO's ranks have an SGD for their own parameters, and a wrapper of no known kind."""
    makers: list[Make] = [
        lambda parameters: torch.optim.Adam(parameters, lr=RATES[0]),
        _Own,
        _replaced,
        _sharded,
    ]
    with apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        for make in makers:
            _expect_unweighted(_train(make, _by_hand), make)


def check_an_optimizer_that_another_one_calls() -> None:
    """Whose wrapper is none for torch: it has the same groups, and no hooks."""

    class _Never:
        def average_parameters(self, params: object) -> None:
            pass

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return PostLocalSGDOptimizer(_sgd(parameters), _Never())

    with apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        _expect_weighted(_train(make, _by_hand), "wrapper")
