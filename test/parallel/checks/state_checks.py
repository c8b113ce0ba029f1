"""Parameters, optimizer state and objects made equal on all ranks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from patterns import assert_same, raised, values
from torch import nn

import perseus.torch.horovod as hvd


def _root() -> int:
    return hvd.size() - 1


def check_broadcast_parameters_takes_dicts_and_lists() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    right = hvd.broadcast_object(model.state_dict(), _root(), name="right")
    for params in (
        model.state_dict(),
        list(model.named_parameters()),
        list(model.parameters()),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                if hvd.rank() != _root():
                    parameter.add_(1.0 + hvd.rank())
        hvd.broadcast_parameters(params, _root())
        for name, tensor in model.state_dict().items():
            assert_same(tensor, right[name])
    text = raised(ValueError, lambda: hvd.broadcast_parameters(model.named_parameters(), 0))
    assert "invalid params of type" in text


def check_order_of_a_dict_does_not_matter() -> None:
    names = ["a", "b", "c"]
    if hvd.rank() % 2:
        names.reverse()
    params = OrderedDict(
        (name, values((ord(name) - 90,), torch.float32, hvd.rank())) for name in names
    )
    hvd.broadcast_parameters(params, 0)
    for name in names:
        assert_same(params[name], values((ord(name) - 90,), torch.float32, 0))


def _trained(optimizer_class: type, steps: int, **options: object):
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    optimizer = optimizer_class(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(2, 1, 4, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def _assert_state_equal(optimizer: torch.optim.Optimizer) -> None:
    plain = optimizer.state_dict()
    everyone = hvd.allgather_object(plain, name="state")
    right = everyone[_root()]
    for other in everyone:
        assert other["param_groups"] == right["param_groups"]
        assert other["state"].keys() == right["state"].keys()
        for index, entry in right["state"].items():
            assert other["state"][index].keys() == entry.keys()
            for key, value in entry.items():
                mine = other["state"][index][key]
                if isinstance(value, torch.Tensor):
                    assert_same(mine, value)
                else:
                    assert mine == value and type(mine) is type(value)


def check_optimizer_state_of_every_kind() -> None:
    for optimizer_class, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
    ):
        lr = 0.01 * (1 + hvd.rank())
        _, optimizer = _trained(optimizer_class, 2, lr=lr, **options)
        hvd.broadcast_optimizer_state(optimizer, _root())
        assert optimizer.param_groups[0]["lr"] == 0.01 * hvd.size()
        _assert_state_equal(optimizer)


def check_state_that_only_the_root_has() -> None:
    model, optimizer = _trained(torch.optim.Adam, 3 if hvd.rank() == _root() else 0, lr=0.01)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, _root())
    _assert_state_equal(optimizer)
    # Nobody's weights were touched.
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert_same(parameter.detach(), old)
    assert len(optimizer.state_dict()["state"]) == 4


def check_state_that_only_the_others_have() -> None:
    _, optimizer = _trained(torch.optim.Adam, 0 if hvd.rank() == _root() else 2, lr=0.01)
    hvd.broadcast_optimizer_state(optimizer, _root())
    _assert_state_equal(optimizer)


def check_stateless_optimizers_get_the_options() -> None:
    _, optimizer = _trained(torch.optim.SGD, 1, lr=0.1 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1


def check_without_state_missing_gradients_become_zeros() -> None:
    """Horovod leaves them behind when it creates state; its own tests look at them."""
    own = [values((2, 3), torch.float32, hvd.rank(), salt) for salt in range(4)]
    parameters = [nn.Parameter(value) for value in own[:3]]
    parameters[0].requires_grad_(False)
    parameters[1].grad = own[3]
    present = parameters[1].grad.clone()
    hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), _root())
    assert parameters[0].grad is None
    assert_same(parameters[1].grad, present)
    assert_same(parameters[2].grad, torch.zeros(2, 3))
    sparse = torch.optim.SparseAdam([parameters[2]])
    parameters[2].grad = None
    hvd.broadcast_optimizer_state(sparse, _root())
    assert parameters[2].grad is None


def check_state_of_a_distributed_optimizer() -> None:
    model, _ = _trained(torch.optim.SGD, 0, lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 - 0.1 * hvd.rank()),
        model.named_parameters(),
    )
    model(torch.rand(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, _root())
    assert abs(optimizer.param_groups[0]["momentum"] - (0.9 - 0.1 * _root())) < 1e-12
    _assert_state_equal(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    _assert_state_equal(optimizer)


def check_lbfgs_is_refused() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    raised(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, 0))


def check_broadcast_object() -> None:
    for root in range(hvd.size()):
        obj = {
            "rank": hvd.rank(),
            "data": list(range(hvd.rank() * 1000)),
            "f": lambda x, add=root: x + add,
        }
        result = hvd.broadcast_object(obj, root)
        assert result["rank"] == root and len(result["data"]) == root * 1000
        assert result["f"](1) == 1 + root
        assert (result is obj) == (hvd.rank() == root)
    assert hvd.broadcast_object(None if hvd.rank() else 3, name="named") == 3


def check_allgather_object() -> None:
    mine = ["x" * hvd.rank(), torch.tensor([hvd.rank()])]
    for rank, (text, tensor) in enumerate(hvd.allgather_object(mine)):
        assert text == "x" * rank and tensor.tolist() == [rank]
    assert hvd.allgather_object(None) == [None] * hvd.size()
