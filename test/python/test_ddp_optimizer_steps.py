"""What a model on Perseus learns of the optimizers that step its parameters."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.optim import optimizer as hooks

from perseus.torch.distributed.optimizer_steps import OptimizerSteps


class _Model:
    def __init__(self) -> None:
        self.first, self.second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.turns = 0
        self.steps = OptimizerSteps([self.first, self.second], self._all_taken)

    def _all_taken(self) -> None:
        self.turns += 1

    @property
    def rates(self) -> tuple[float, float]:
        return self.steps.rate_of(self.first), self.steps.rate_of(self.second)


def _sgd(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5)


def test_rates_are_known_from_the_first_step_on_and_followed():
    model = _Model()
    groups = [{"params": [model.first]}, {"params": [model.second], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    assert model.rates == (0.0, 0.0)
    optimizer.step()
    assert model.rates == (0.5, 0.25)
    optimizer.param_groups[0]["lr"] = 0.125
    assert model.rates == (0.125, 0.25)


def test_a_parameter_may_come_later_and_go():
    model = _Model()
    optimizer = _sgd(model.first)
    optimizer.step()
    assert model.rates == (0.5, 0.0)
    optimizer.add_param_group({"params": [model.second], "lr": 0.25})
    optimizer.step()
    assert model.rates == (0.5, 0.25)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(2))]
    optimizer.step()
    assert model.rates == (0.0, 0.25)


def test_only_sgd_that_nobody_has_derived_from_has_a_rate():
    class Own(torch.optim.SGD):
        pass

    for kind in (torch.optim.Adam, Own):
        model = _Model()
        optimizer = kind([model.first, model.second], lr=0.5)
        optimizer.step()
        assert model.rates == (0.0, 0.0)


def test_a_parameter_of_two_optimizers_has_no_rate_until_one_is_gone():
    model = _Model()
    both, one = _sgd(model.first, model.second), _sgd(model.first)
    both.step()
    one.step()
    assert model.rates == (0.0, 0.5)
    del one
    assert model.rates == (0.5, 0.5)
    del both
    assert model.rates == (0.0, 0.0)


def test_a_step_counts_for_the_models_whose_parameters_it_changes():
    first, second = _Model(), _Model()
    _sgd(nn.Parameter(torch.zeros(2))).step()
    _sgd(first.first, first.second).step()
    assert (first.turns, second.turns) == (1, 0)
    both = _sgd(first.first, first.second, second.first, second.second)
    both.step()
    assert (first.turns, second.turns) == (2, 1)


def test_all_optimizers_that_stepped_after_the_last_pass_are_expected():
    model = _Model()
    one, other = _sgd(model.first), _sgd(model.second)

    def turns_after(*optimizers: torch.optim.SGD) -> list[int]:
        model.turns = 0
        model.steps.begin_step()
        found = []
        for optimizer in optimizers:
            optimizer.step()
            found.append(model.turns)
        return found

    assert turns_after(one, other) == [0, 1], "at first, of all parameters"
    assert turns_after(one, other) == [0, 1]
    assert turns_after(one) == [0], "the other one may come"
    assert turns_after(one) == [1]
    assert turns_after() == []
    assert turns_after(other) == [0], "a pass without steps says nothing"
    assert turns_after(other) == [1]


def test_neither_models_nor_optimizers_are_kept():
    first, second = _Model(), _Model()
    optimizer = _sgd(first.first, first.second, second.first, second.second)
    optimizer.step()
    gone = [weakref.ref(each) for each in (optimizer, second, second.first, second.steps)]
    del optimizer, second
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    optimizer = _sgd(first.first, first.second)
    optimizer.step()
    gone = [weakref.ref(first), weakref.ref(first.steps)]
    del first
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    optimizer.step()


def test_torch_has_one_hook_for_all_models():
    _Model()
    before = len(hooks._global_optimizer_post_hooks)
    _Model()
    assert len(hooks._global_optimizer_post_hooks) == before


def test_a_compiled_step_is_seen_after_it_was_taken():
    model = _Model()
    optimizer = _sgd(model.first, model.second)
    seen = []
    model.steps._all_taken = lambda: seen.append(model.first.tolist())
    model.first.grad = torch.ones(2)
    torch.compile(optimizer.step, backend="eager")()
    assert seen == [[-0.5, -0.5]] and model.rates == (0.5, 0.5)
