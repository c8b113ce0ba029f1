"""LocalSGD and DiLoCo on one rank: the first is the plain optimizer, the second one worker."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import perseus.torch.horovod as hvd
from perseus.torch import local_steps


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def _start():
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    optimizer.step()


def test_local_sgd_is_the_plain_optimizer():
    (expected, plain), (model, inner) = _start(), _start()
    optimizer = hvd.LocalSGD(inner, model.named_parameters(), every=2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for step in range(7):
        _step(expected, plain, step)
        _step(model, optimizer, step)
    hvd.synchronize_parameters()
    assert torch.equal(model.weight, expected.weight)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()


def test_lbfgs_meets_nobody_who_would_call_its_closure_differently_often(monkeypatch):
    hvd.shutdown()
    monkeypatch.setenv("PERSEUS_ALLREDUCE_NANCHECK", "1")
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DiLoCo(torch.optim.LBFGS([weight]), [("weight", weight)], every=2)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.state_dict()["perseus_local_steps"]["step"] == 3


@pytest.mark.parametrize("delay", [0, 3])
def test_the_outer_optimizer_is_that_of_torch(delay):
    (expected, plain), (model, inner) = _start(), _start()
    optimizer = hvd.DiLoCo(
        inner, model.named_parameters(), every=3, delay=delay, outer_lr=0.7, outer_momentum=0.9
    )
    everywhere = [torch.nn.Parameter(each.detach().clone()) for each in expected.parameters()]
    outer = torch.optim.SGD(everywhere, lr=0.7, momentum=0.9, nesterov=True)
    sent = None
    for step in range(1, 14):
        _step(expected, plain, step)
        _step(model, optimizer, step)
        parameters = [each.detach() for each in expected.parameters()]
        if sent is not None and step % 3 == 0:
            _outer_step(outer, everywhere, sent, parameters)
        if step % 3 == 0:
            sent = [each.clone() for each in parameters]
            if delay == 0:
                _outer_step(outer, everywhere, sent, parameters)
                sent = None
        for ours, wanted in zip(model.parameters(), parameters, strict=True):
            assert torch.allclose(ours, wanted, atol=1e-6)


def _outer_step(outer, everywhere, sent, parameters):
    for each, value in zip(everywhere, sent, strict=True):
        each.grad = each.detach() - value
    outer.step()
    for each, value, parameter in zip(everywhere, sent, parameters, strict=True):
        parameter.add_(each.detach() - value)


def test_one_worker_saves_and_resumes():
    model, inner = _start()
    optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=4, fragments=2)
    for step in range(9):
        _step(model, optimizer, step)
    other, inner = _start()
    resumed = hvd.DiLoCo(inner, other.named_parameters(), every=4, fragments=2)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(9, 20):
        _step(model, optimizer, step)
        _step(other, resumed, step)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    ("every", "delay", "fragments"),
    [(1, 0, 1), (1, 1, 1)]
    + [(e, e * half // 2, parts) for e in (4, 8) for half in range(3) for parts in (1, 2)],
)
def test_a_run_may_go_on_at_a_faster_pace(every, delay, fragments):
    """With an outer rate of 1 and no momentum, one rank does what the plain optimizer does."""
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "compression": hvd.Compression.none}
    outer["fragments"] = fragments
    (expected, plain), (model, inner) = _start(), _start()
    optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=8, delay=8, **outer)
    for step in range(20):
        if step == 10:  # what was sent after 8 steps would be due after 16
            saved = copy.deepcopy(optimizer.state_dict())
            assert len(saved["perseus_local_steps"]["under_way"]) == fragments
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            pace = {"every": every, "delay": delay}
            optimizer = hvd.DiLoCo(inner, model.named_parameters(), **pace, **outer)
            optimizer.load_state_dict(saved)
        _step(expected, plain, step)
        _step(model, optimizer, step)
        assert torch.allclose(model.weight, expected.weight, atol=1e-6)


def test_what_was_under_way_arrives_in_the_order_in_which_it_is_due():
    """Parts are exchanged in turns, which another pace may have in another order."""
    model, inner = _start()
    optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=4, fragments=2)
    under_way = [(part, 20, torch.zeros(3), torch.ones(3)) for part in (1, 0)]
    optimizer._local_steps.take_over({"step": 5, "parts": 2, "under_way": under_way})
    assert [(each.part, each.due) for each in optimizer._local_steps._under_way] == [(0, 6), (1, 8)]


@pytest.mark.parametrize("wrap", [hvd.LocalSGD, hvd.DiLoCo])
def test_parameters_on_several_devices_are_refused(wrap, monkeypatch):
    monkeypatch.setattr(local_steps, "alone", lambda: False)
    model = torch.nn.ParameterList([torch.zeros(3), torch.zeros(3, device="meta")])
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="all must be on one device, but they are on cpu, meta"):
        wrap(plain, model.named_parameters(), every=4)


def test_state_is_taken_over_from_another_device():
    model = torch.nn.Linear(2, 1, bias=False, device="meta")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DiLoCo(plain, model.named_parameters(), every=4)
    under_way = [(0, 4, torch.zeros(3), torch.ones(3))]
    optimizer._local_steps.take_over({"step": 3, "parts": 1, "under_way": under_way})
    (exchange,) = optimizer._local_steps._under_way
    assert exchange.sent.device.type == exchange.average.device.type == "meta"
