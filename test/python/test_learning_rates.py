"""The rates of an optimizer's next step, as codecs hear of them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from perseus.torch.learning_rates import learning_rates, steps_of


def _optimizer(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    return kind([{"params": [first, second]}, {"params": [third], "lr": 0.25}], lr=0.5)


def test_each_groups_rate_is_that_of_its_parameters() -> None:
    optimizer = _optimizer(torch.optim.SGD)
    rate_of = learning_rates(optimizer, torch.optim.SGD)
    (first, second), (third,) = (group["params"] for group in optimizer.param_groups)
    assert (rate_of([first, second]), rate_of([third])) == (0.5, 0.25)
    assert rate_of([second, third]) == 0.0
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    assert rate_of([second, third]) == 0.5


def test_it_follows_what_the_optimizer_loads_and_loses() -> None:
    optimizer = _optimizer(torch.optim.SGD)
    rate_of = learning_rates(optimizer, torch.optim.SGD)
    (first, _), (third,) = (group["params"] for group in optimizer.param_groups)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][1]["lr"] = 0.125
    optimizer.load_state_dict(state)
    assert rate_of([third]) == 0.125
    del optimizer.param_groups[1]
    assert (rate_of([first]), rate_of([third])) == (0.5, 0.0)
    del optimizer
    assert rate_of([first]) == 0.0


def test_the_steps_of_a_models_parameters_are_those_of_their_master_weights() -> None:
    optimizer = _optimizer(torch.optim.SGD)
    params = optimizer.param_groups[1]["params"]
    models = {params[0].detach().clone(): params[0]}
    params[:] = models
    step_of = steps_of(optimizer, torch.optim.SGD, models)
    assert step_of(list(models.values())) == (0.25, 0.0)


def test_steps_that_may_not_be_proportional_have_no_rate() -> None:
    class Own(torch.optim.SGD):
        pass

    for kind in (torch.optim.Adam, Own):
        optimizer = _optimizer(kind)
        assert learning_rates(optimizer, kind)([optimizer.param_groups[0]["params"][0]]) == 0.0


def test_the_momentum_is_known_where_it_is_the_plain_one() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for options, expected in (
        ({}, 0.0),
        ({"momentum": 0.9}, 0.9),
        ({"momentum": 0.9, "weight_decay": 0.1, "maximize": True}, 0.9),
        ({"momentum": 0.9, "dampening": 0.5}, 0.0),
        ({"momentum": 0.9, "nesterov": True}, 0.0),
    ):
        optimizer = torch.optim.SGD([parameter], lr=0.5, **options)
        assert steps_of(optimizer, torch.optim.SGD)([parameter]) == (0.5, expected), options
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [first]}, {"params": [second], "momentum": 0.5}]
    step_of = steps_of(torch.optim.SGD(groups, lr=0.5, momentum=0.9), torch.optim.SGD)
    assert step_of([first, second]) == (0.0, 0.0)  # the optimizer is gone
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    step_of = steps_of(optimizer, torch.optim.SGD)
    assert step_of([first, second]) == (0.5, 0.0)
    assert step_of([second]) == (0.5, 0.5)
