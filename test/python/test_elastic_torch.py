"""TorchState and ElasticSampler in one process: what is saved, restored and dealt out."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler as rates

import perseus.torch.horovod as hvd
from perseus.elastic import HostUpdateResult, reset, run_fn
from perseus.elastic import sampler as sampler_module
from perseus.torch.elastic import ElasticSampler, TorchState
from perseus.torch.elastic import state as state_module
from perseus.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def _model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.rand(5, 3, generator=generator)).square().sum().backward()
    optimizer.step()


def _everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [
        value
        for _, entry in sorted(optimizer.state_dict()["state"].items())
        for _, value in sorted(entry.items())
    ]
    return [tensor.clone() for tensor in [*model.state_dict().values(), *moments]]


def _assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


# ---- state ----


def test_restore_gives_back_weights_buffers_moments_and_options_every_time():
    model = _model()
    optimizer = _adam(model)
    state = TorchState(model, optimizer, batch=0)
    _step(model, optimizer, 1)
    state.batch = 1
    state.save()
    saved = _everything(model, optimizer)
    assert len(saved) == 7 + 4 * 3
    parameters = list(model.parameters())
    for attempt in range(2):  # the first must not spoil what the second needs
        _step(model, optimizer, 2 + attempt)
        optimizer.param_groups[0]["lr"] = 5.0
        state.batch = 2
        state.restore()
        _assert_same(_everything(model, optimizer), saved)
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert state.batch == 1
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_going_on_after_restore_gives_the_bits_of_never_having_failed():
    straight = _model()
    optimizer = _adam(straight)
    for step in range(4):
        _step(straight, optimizer, step)
    model = _model()
    failing = _adam(model)
    state = TorchState(model, failing)
    for step in range(2):
        _step(model, failing, step)
    state.commit()
    _step(model, failing, 77)
    state.restore()
    for step in range(2, 4):
        _step(model, failing, step)
    _assert_same(_everything(model, failing), _everything(straight, optimizer))


def test_without_perseusrun_every_commit_copies():
    model = torch.nn.Linear(2, 1)
    state = TorchState(model)
    state.check_host_updates = lambda: None  # it would communicate
    weights = torch.tensor([[1.0, 2.0]])
    with torch.no_grad():
        model.weight.copy_(weights)
    state.commit(copy=False)
    torch.nn.init.zeros_(model.weight)
    state.restore()
    assert torch.equal(model.weight, weights)


@pytest.mark.parametrize("marks", [True, False])
def test_every_commit_makes_the_same_collectives(monkeypatch, marks):
    """Whether it copies is a matter of each rank; what has been marked is committed at once."""
    state = TorchState(torch.nn.Linear(2, 1), step=0)
    monkeypatch.setattr(TorchState, "_can_mark", lambda _: marks)
    done = []
    for name in ("mark", "save", "check_host_updates"):
        monkeypatch.setattr(state, name, functools.partial(done.append, name))
    monkeypatch.setattr(
        "perseus.elastic.state.synchronize_parameters", functools.partial(done.append, "equal")
    )
    state.commit(copy=False)
    assert done == [*(["mark", "equal"] if marks else ["equal", "save"]), "check_host_updates"]


def test_sync_does_not_refresh_the_saved_copies():
    model = _model()
    state = TorchState(model, batch=3)
    first = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1)
    state.sync()
    assert torch.equal(model[0].weight, first["0.weight"] + 1)
    state.restore()
    assert torch.equal(model[0].weight, first["0.weight"])


def test_assigning_another_model_saves_it():
    state = TorchState(_model(1), epoch=0)
    other = _model(2)
    weight = other[0].weight.detach().clone()
    state.model = other
    with torch.no_grad():
        other[0].weight.zero_()
    state.restore()
    assert state.model is other
    assert torch.equal(other[0].weight, weight)
    state.epoch = 4  # a plain value is only shown
    state.restore()
    assert state.epoch == 0


def test_more_models_and_samplers_go_by_any_name():
    generator, critic = _model(1), _model(2)
    sampler = ElasticSampler(range(10))
    state = TorchState(generator, critic=critic, sampler=sampler, note="x")
    weight = critic[0].weight.detach().clone()
    with torch.no_grad():
        critic[0].weight.zero_()
    sampler.record_batch(0, 4)
    state.note = "y"
    state.restore()
    assert torch.equal(critic[0].weight, weight)
    assert (sampler.processed_num, state.note) == (0, "x")
    assert state.optimizer is None


@pytest.mark.parametrize("base", [StateHandler, object])
def test_registered_handlers_keep_other_kinds_of_values(base):
    class Counter:
        def __init__(self) -> None:
            self.count = 0

    class CounterHandler(base):  # three methods are enough
        def __init__(self, value: Counter) -> None:
            self.value = value
            self.save()

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    usual = get_handler_registry()
    set_handler_registry([*usual, (Counter, CounterHandler)])
    try:
        state = TorchState(counter=Counter())
    finally:
        set_handler_registry(usual)
    state.on_reset()
    state.counter.count = 5
    state.commit()
    state.counter.count = 6
    state.sync()
    state.restore()
    assert state.counter.count == 5


def test_a_new_world_forgets_what_optimizers_had_begun_in_the_last(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # reduce gradients of one rank, too
    model = _model()
    optimizer = _adam(model)
    model(torch.rand(5, 3)).sum().backward()
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    hvd.shutdown()
    hvd.init()
    optimizer.zero_grad()
    _step(model, optimizer, 1)
    _step(model, optimizer, 2)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("change", [*HostUpdateResult, None])
def test_no_gradient_outlives_the_world_that_computed_it(monkeypatch, marks, change):
    """As on new ranks, there is none: zeros would move parameters that have no gradient."""
    monkeypatch.setattr(TorchState, "_can_mark", lambda _: marks)
    model, critic = _model(1), _model(2)
    alone = torch.nn.Parameter(torch.tensor([3.0, 5.0]))
    # Adam has a state, SGD without momentum none.
    optimizer, other = _adam(model), torch.optim.SGD([alone], lr=0.5)
    state = TorchState(model, optimizer, critic=critic, other=other)
    parameters = [*model.parameters(), *critic.parameters(), alone]
    found = []

    def train(state):
        found.append([parameter.grad for parameter in parameters])
        if len(found) > 1:
            return
        (critic(torch.ones(2, 3)).sum() + (alone * torch.tensor([1.0, 2.0])).sum()).backward()
        _step(model, optimizer, 1)
        other.step()
        assert not any(parameter.grad is None for parameter in parameters)
        if change:
            state.on_hosts_updated(1.0, change)
        state.commit(copy=False)
        raise hvd.HorovodInternalError("injected")

    run_fn(train, reset)(state)
    assert found[1] == [None] * len(parameters)


def test_restoring_an_optimizer_forgets_that_it_had_synchronized():
    model = _model()
    optimizer = _adam(model)
    state = TorchState(optimizer=optimizer)
    optimizer.synchronize()
    state.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, optimizer, 1)


# ---- learning rate schedulers ----


def _plain(optimizer):
    return rates.StepLR(optimizer, 2, 0.5)


def _of_metric(optimizer):
    return rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def _of_momentum(optimizer):
    return rates.OneCycleLR(optimizer, max_lr=0.5, total_steps=9)


def _of_function(optimizer):
    return rates.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def _in_turn(optimizer):
    parts = [rates.ConstantLR(optimizer, 0.5, 2), rates.ExponentialLR(optimizer, 0.75)]
    return rates.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer):
    return rates.ChainedScheduler([_plain(optimizer), rates.CyclicLR(optimizer, 0.1, 1.0, 3)])


SCHEDULERS = [_plain, _of_metric, _of_momentum, _of_function, _in_turn, _chained]


def _scheduled(make):
    """An optimizer with momentum of two groups, and its scheduler."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.5, 0.25)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0, momentum=0.5))
    return optimizer, make(optimizer)


def _advance(optimizer, scheduler, steps=1):
    """Take steps; returns learning rates and momenta after each."""
    found = []
    for _ in range(steps):
        optimizer.step()
        metric = [1.0] if isinstance(scheduler, rates.ReduceLROnPlateau) else []
        scheduler.step(*metric)
        found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_goes_back_to_the_commit_with_its_optimizer(monkeypatch, marks, make):
    monkeypatch.setattr(TorchState, "_can_mark", lambda _: marks)
    optimizer, scheduler = _scheduled(make)
    state = TorchState(optimizer=optimizer, scheduler=scheduler)
    _advance(optimizer, scheduler, 1)
    state.commit(copy=False)
    expected = _advance(optimizer, scheduler, 4)
    assert len({str(each) for each in expected}) > 1
    for _ in range(2):  # the first must not spoil what the second needs
        state.restore()
        assert state.scheduler is scheduler
        assert scheduler.optimizer is optimizer
        assert _advance(optimizer, scheduler, 4) == expected


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_that_takes_over_a_state_stays_that_of_its_optimizer(monkeypatch, make):
    further, further_scheduler = _scheduled(make)
    _advance(further, further_scheduler, 3)
    optimizer, scheduler = _scheduled(make)
    state = TorchState(optimizer=optimizer, scheduler=scheduler)
    sent = copy.deepcopy(further_scheduler.state_dict())
    monkeypatch.setattr(state_module, "broadcast_object", lambda _: sent)
    state._handlers["scheduler"].sync()
    for group, of_root in zip(optimizer.param_groups, further.param_groups, strict=True):
        group.update({key: value for key, value in of_root.items() if key != "params"})
    assert scheduler.optimizer is optimizer
    assert _advance(optimizer, scheduler, 4) == _advance(further, further_scheduler, 4)


def test_without_copies_another_optimizer_keeps_its_own_options(monkeypatch):
    monkeypatch.setattr(TorchState, "_can_mark", lambda _: True)
    state = TorchState(optimizer=_scheduled(_plain)[0])
    state.commit(copy=False)
    state.optimizer, _ = _scheduled(_in_turn)
    rate = state.optimizer.param_groups[0]["lr"]
    assert rate == 0.25
    state.restore()
    assert state.optimizer.param_groups[0]["lr"] == rate


# ---- sampler ----


@pytest.fixture
def place(monkeypatch):
    """place(rank, size): what samplers take the world to be from then on."""

    def put(rank: int, size: int) -> None:
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)

    return put


def _order(count: int, seed: int) -> list[int]:
    indices = list(range(count))
    random.Random(seed).shuffle(indices)
    return indices


def _shares(place, size: int, **progress: int) -> list[list[int]]:
    """What each of `size` ranks gets of 23 samples with seed 5."""
    shares = []
    for rank in range(size):
        place(rank, size)
        sampler = ElasticSampler(range(23), seed=5)
        sampler.load_state_dict({"epoch": 0, "processed_num": 0, **progress})
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    return shares


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("processed", [0, 6, 20, 22])
def test_ranks_share_what_is_left_in_turns(place, size, processed):
    left = _order(23, 5 + 2)[processed:]
    shares = _shares(place, size, epoch=2, processed_num=processed)
    each = -(-len(left) // size)
    assert {len(share) for share in shares} == {each}
    dealt = [sample for turn in zip(*shares, strict=True) for sample in turn]
    assert dealt[: len(left)] == left
    repeated = dealt[len(left) :]
    assert repeated == (left * size)[: len(repeated)]


@pytest.mark.parametrize("processed", [23, 24])
def test_an_epoch_that_is_over_has_nothing_left(place, processed):
    assert _shares(place, 2, processed_num=processed) == [[], []]


def test_without_shuffling_the_order_is_the_datasets(place):
    place(1, 2)
    sampler = ElasticSampler(range(6), shuffle=False)
    assert list(sampler) == [1, 3, 5]
    sampler.set_epoch(3)
    assert list(sampler) == [1, 3, 5]


def test_progress_takes_effect_when_the_sampler_is_reset(place):
    place(0, 3)
    sampler = ElasticSampler(range(20), shuffle=False)
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 1)
    assert sampler.processed_num == 9
    assert list(sampler) == [0, 3, 6, 9, 12, 15, 18]
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 9}
    assert sampler.processed_indices == set(range(9))
    place(1, 2)
    sampler.reset()
    assert (sampler.num_replicas, sampler.rank) == (2, 1)
    assert sampler.remaining_indices == list(range(9, 20))
    assert list(sampler) == [10, 12, 14, 16, 18, 9]
    assert (sampler.num_samples, sampler.total_size) == (6, 12)
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(sampler) == 10


def test_a_new_world_without_sync_deals_out_anew(place):
    place(0, 2)
    sampler = ElasticSampler(range(8), shuffle=False)
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 1)
    place(0, 1)
    state.on_reset()
    assert list(sampler) == [2, 3, 4, 5, 6, 7]


def test_a_data_loader_takes_it(place):
    place(1, 2)
    data = torch.arange(10) * 3
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, sampler=ElasticSampler(data, shuffle=False)
    )
    assert [batch.tolist() for batch in loader] == [[3, 9], [15, 21], [27]]


def test_before_init_it_says_so():
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        ElasticSampler(range(3))
