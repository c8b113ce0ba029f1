"""Master weights: float32 copies that take the places of a model's parameters in the optimizer.

As apex puts them there, by amp.initialize(model, optimizer, opt_level="O2") or FP16_Optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from adasum_checks import adasum_of
from patterns import apart, assert_job_usable, raised, values, world_with
from sloping_training import equal_everywhere
from torch import nn

import perseus
import perseus.torch.horovod as hvd
from perseus.torch import reducer

SCALE = 128.0  # of the loss, which is divided out where gradients are copied
RATES = {"first": 1.0, "norm": 1.0, "frozen": 0.5, "last": 0.5}
HALVES = ("first", "last")
TRAINED = ("first", "norm", "last")


def _gradient(name: str, rank: int, step: int) -> torch.Tensor:
    number = TRAINED.index(name)
    return values((2, 3 + number), torch.float32, rank, salt=2 * step + 3 * number)


class _Mixed:
    """A training with parameters of bfloat16, some of float32, like BatchNorm's, and a frozen one.

    taken: the steps until now. expected: the trained parameters, in full precision.
    """

    def __init__(
        self, wrap: Callable[..., torch.optim.Optimizer] = hvd.DistributedOptimizer, **options
    ) -> None:
        self.model = {
            name: nn.Parameter(torch.zeros(2, 3 + number, dtype=torch.bfloat16))
            for number, name in enumerate(TRAINED)
        }
        self.model["norm"] = nn.Parameter(torch.zeros(2, 4))
        self.model["frozen"] = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), False)
        self.optimizer = self._wrapped(wrap, **options)
        self.masters: dict[str, torch.Tensor] = {}
        self.expected = {name: torch.zeros(2, 3 + n) for n, name in enumerate(TRAINED)}
        self.taken = 0

    def _wrapped(self, wrap, bundled: bool = False, named: bool = True, **options):
        if bundled:
            options["groups"] = [[self.model[name] for name in HALVES]]
        first = [self.model["first"], self.model["norm"]]
        second = {"params": [self.model["frozen"], self.model["last"]], "lr": 0.5}
        plain = torch.optim.SGD([{"params": first}, second], lr=1.0)
        return wrap(plain, self.model.items() if named else None, **options)

    def put_masters(self) -> None:
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                (name,) = [name for name, each in self.model.items() if each is parameter]
                if name in HALVES:
                    master = parameter.detach().clone().float().requires_grad_()
                    self.masters[name] = group["params"][index] = master

    def backward(self) -> None:
        losses = [
            (self.model[name].float() * _gradient(name, hvd.rank(), self.taken)).sum()
            for name in TRAINED
        ]
        (sum(losses) * SCALE).backward()

    def clear(self) -> None:
        for parameter in (*self.model.values(), *self.masters.values()):
            parameter.grad = None

    def copy_gradients(self) -> None:
        for name in TRAINED:
            weight = self.masters.get(name, self.model[name])
            weight.grad = (self.model[name].grad.float() / SCALE).to(weight.dtype)

    def copy_masters(self) -> None:
        for name, master in self.masters.items():
            self.model[name].data.copy_(master.data)

    def apply(self) -> None:
        """What follows synchronize(), without clipping."""
        self.copy_gradients()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.copy_masters()

    def step(self, *, passes: int = 1, combine=sum, clip: float = 1e9) -> None:
        self.clear()
        for _ in range(passes):
            self.backward()
        self.optimizer.synchronize()
        self.copy_gradients()
        weights = [self.masters.get(name, self.model[name]) for name in TRAINED]
        nn.utils.clip_grad_norm_(weights, clip)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.copy_masters()
        gradients = [
            combine(_gradient(name, rank, self.taken) for rank in range(hvd.size())) * passes
            for name in TRAINED
        ]
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        self.move(gradients, min(1.0, clip / norm))
        self.taken += 1

    def move(self, gradients: list[torch.Tensor], factor: float = 1.0) -> None:
        """Take the step that the training is expected to take."""
        for name, gradient in zip(TRAINED, gradients, strict=True):
            self.expected[name] -= RATES[name] * factor * gradient

    def check(self, tolerance: float = 1e-6) -> None:
        weights = {**{name: self.model[name] for name in TRAINED}, **self.masters}
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight.detach().float(), self.expected[name], rtol=tolerance, atol=tolerance
            )
        assert equal_everywhere([each.detach() for each in weights.values()])
        assert torch.equal(self.model["frozen"].float(), torch.ones(3))

    def reduced(self) -> set[str]:
        """The names of the parameters whose gradients are reduced; masters have none."""
        reduced = self.optimizer._reducer.parameters()
        assert len(reduced) == sum(each in reduced for each in self.model.values())
        return {name for name, each in self.model.items() if each in reduced}


def _mean(gradients: Iterator[torch.Tensor]) -> torch.Tensor:
    return sum(gradients) / hvd.size()


def check_the_gradients_of_the_model_are_reduced_in_every_step() -> None:
    for before in (0, 2):  # steps without masters
        for options in (
            {},
            {"bundled": True},
            {"named": False},
            {"compression": hvd.Compression.none},
        ):
            training = _Mixed(op=hvd.Sum, **options)
            for step in range(before + 4):
                if step == before:
                    training.put_masters()
                training.step()
                training.check()
                assert training.reduced() == set(TRAINED)


def check_averages_are_clipped_and_passes_are_summed() -> None:
    for options in ({"clip": 2.5}, {"passes": 3}):
        training = _Mixed(backward_passes_per_step=options.get("passes", 1))
        training.put_masters()
        for _ in range(4):
            training.step(combine=_mean, **options)
            training.check(tolerance=0.02)


def check_parameters_are_compared_under_their_own_names() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=1):
        training = _Mixed(op=hvd.Sum)
        training.put_masters()
        for _ in range(3):
            training.step()
            training.check()
        training.masters["last"].data += hvd.rank()
        message = raised(hvd.HorovodInternalError, training.optimizer.step)
        assert "the parameter last is not the same on all ranks" in message


def check_every_backward_pass_may_be_synchronized() -> None:
    """As scripts do it that accumulate gradients of which each is reduced (ClipBERT)."""
    training = _Mixed()
    with training.optimizer.skip_synchronize():
        training.optimizer.zero_grad()
        training.optimizer.step()
    training.put_masters()
    for _ in range(3):
        training.clear()
        for _ in range(2):
            training.backward()
            training.optimizer.synchronize()
        training.apply()
        for _ in range(2):
            ranks = range(hvd.size())
            training.move([_mean(_gradient(n, r, training.taken) for r in ranks) for n in TRAINED])
        training.check(tolerance=0.02)
        training.taken += 1


def check_masters_send_nothing() -> None:
    def operations(masters: bool) -> int:
        training = _Mixed(op=hvd.Sum)
        training.step()
        if masters:
            training.put_masters()
        before = perseus.stats()["operations"]
        for _ in range(3):
            training.step()
        return perseus.stats()["operations"] - before

    assert [operations(False), operations(True)] == [3 * len(TRAINED)] * 2


def check_codecs_hear_of_the_masters_learning_rates() -> None:
    training = _Mixed(op=hvd.Sum)
    training.put_masters()
    for rates in ((1.0, 0.5), (0.25, 0.125)):
        for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        training.step()
        for name, rate in zip(HALVES, rates, strict=True):
            assert training.optimizer._reducer.step_of([training.model[name]]) == (rate, 0.0)


def check_a_step_that_would_reduce_after_the_copy_is_refused() -> None:
    for steps in (0, 2):
        training = _Mixed(op=hvd.Sum)
        training.put_masters()
        training.optimizer.step()  # before any backward pass, there is nothing to reduce
        for _ in range(steps):
            training.step()
        training.clear()
        training.backward()
        training.copy_gradients()
        message = raised(ValueError, training.optimizer.step)
        assert "call optimizer.synchronize() after loss.backward()" in message
        assert_job_usable()
        training.step()
        training.check()

    def compute() -> None:
        training.clear()
        training.backward()
        training.copy_gradients()

    raised(ValueError, lambda: training.optimizer.step(compute))
    with training.optimizer.skip_synchronize():
        raised(ValueError, lambda: training.optimizer.step(compute))
    training.step()
    training.check()


def check_a_closure_may_synchronize_before_it_copies() -> None:
    def compute() -> None:
        training.clear()
        training.backward()
        training.optimizer.synchronize()
        training.copy_gradients()

    training = _Mixed(op=hvd.Sum)
    training.put_masters()
    for _ in range(3):
        with training.optimizer.skip_synchronize():
            training.optimizer.step(compute)
        training.copy_masters()
        ranks = range(hvd.size())
        training.move([sum(_gradient(n, r, training.taken) for r in ranks) for n in TRAINED])
        training.taken += 1
        training.check()


def check_loaded_states_keep_the_masters() -> None:
    training = _Mixed(op=hvd.Sum)
    training.put_masters()
    for _ in range(2):
        for _ in range(2):
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
            training.step()
        hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
    training.check()
    assert training.reduced() == set(TRAINED)


def check_a_parameter_goes_with_its_master() -> None:
    training = _Mixed(op=hvd.Sum, bundled=True)
    training.put_masters()
    training.step()
    params = training.optimizer.param_groups[1]["params"]
    params.append(params.pop(0))  # which moves the master, and keeps it
    training.step()
    assert training.reduced() == set(TRAINED)
    other = params[0] = nn.Parameter(torch.zeros(2, 5))
    training.step()
    reduced = training.optimizer._reducer.parameters()
    assert reduced == {training.model["first"], training.model["norm"], other}
    assert training.optimizer._parameters.names.keys().isdisjoint([training.model["last"]])
    other.grad = None
    (other * (hvd.rank() + 1)).sum().backward()
    training.optimizer.synchronize()
    assert torch.equal(other.grad, torch.full((2, 5), sum(range(1, hvd.size() + 1))))


def check_a_parameter_may_come_back_for_its_master() -> None:
    training = _Mixed(op=hvd.Sum)
    training.put_masters()
    training.step()
    training.optimizer.param_groups[1]["params"][1] = training.model["last"]
    del training.masters["last"]
    for _ in range(2):
        training.step()
        training.check()
        assert training.reduced() == set(TRAINED)


def check_another_parameter_of_the_same_dtype_is_no_master() -> None:
    old, new = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([old], lr=1.0), op=hvd.Sum)
    optimizer.param_groups[0]["params"][0] = new
    for step in range(1, 3):
        optimizer.zero_grad()
        (new * values((3,), torch.float32, hvd.rank())).sum().backward()
        optimizer.step()
        total = sum(values((3,), torch.float32, rank) for rank in range(hvd.size()))
        assert torch.equal(new.detach(), -step * total)
    assert optimizer._reducer.parameters() == {new}


def check_a_backward_pass_that_reaches_a_master_is_refused() -> None:
    """It is no master then, but another parameter, in whose place nothing is reduced."""
    old, new = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([old], lr=1.0), [("weight", old)])
    optimizer.param_groups[0]["params"][0] = new
    optimizer.synchronize()
    message = raised(ValueError, lambda: new.sum().backward())
    assert "has taken the place of weight" in message and "wrap the optimizer anew" in message
    narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([new], lr=1.0), op=hvd.Sum)
    optimizer.param_groups[0]["params"][0] = narrow  # which holds less than the one before it
    for _ in range(2):
        optimizer.zero_grad()
        narrow.sum().backward()
        optimizer.step()
    assert torch.equal(narrow.detach().float(), torch.full((3,), -2.0 * hvd.size()))


def check_a_new_rank_reduces_what_survivors_do() -> None:
    """As one of an elastic job: it wraps the model's parameters, and then puts its masters."""
    for options in ({}, {"bundled": True}):
        training = _Mixed(op=hvd.Sum, **options)
        training.put_masters()
        training.optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
        training.step()
        training.optimizer.param_groups.pop()  # the new rank does not know it
        # There, ranks that are elsewhere are not asked for the order of bundles.
        with world_with(), patch.object(reducer, "elastic", lambda: True):
            if hvd.rank() == hvd.size() - 1:
                old, training = training, _Mixed(op=hvd.Sum, **options)
                training.put_masters()
                for name, master in training.masters.items():
                    master.data.copy_(old.masters[name].data)
                training.model["norm"].data.copy_(old.model["norm"].data)
                training.expected, training.taken = old.expected, old.taken
            for _ in range(2):
                training.step()
                training.check()
                assert training.reduced() == set(TRAINED)


@contextmanager
def _worlds(members: hvd.ProcessSet) -> Iterator[Callable[[int], None]]:
    """A function that begins a world in which all ranks but one, from this one on, are members."""

    def begin(first: int) -> None:
        hvd.barrier()
        hvd.shutdown()
        members.ranks = list(range(first, first + hvd_size - 1))
        hvd.init(process_sets=[members])

    hvd_size = hvd.size()
    yield begin
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def check_ranks_that_begin_to_take_part_reduce_the_model() -> None:
    members = hvd.ProcessSet([])
    with _worlds(members) as begin, patch.object(reducer, "elastic", lambda: True):
        for stepped in (False, True):  # before another world begins
            begin(0)
            training = _Mixed(op=hvd.Sum, bundled=True, process_set=members)
            training.put_masters()
            for first in (0, 1, 0)[0 if stepped else 1 :]:
                begin(first)
                for _ in range(2):
                    training.clear()
                    training.backward()
                    training.optimizer.synchronize()
                    for name in TRAINED:
                        ranks = members.ranks if members.included() else [hvd.rank()]
                        total = sum(_gradient(name, rank, training.taken) for rank in ranks)
                        assert torch.equal(training.model[name].grad.float() / SCALE, total)
                    training.taken += 1
                taking_part = set(TRAINED) if members.included() else set()
                assert training.reduced() == taking_part


def check_steps_may_be_summed() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        training = _Mixed(op=hvd.Sum)
        training.put_masters()
        for _ in range(3):
            for _ in range(2):
                training.clear()
                training.backward()
                training.optimizer.synchronize()
                training.apply()
                training.move(
                    [
                        sum(_gradient(name, rank, training.taken) for rank in range(hvd.size()))
                        for name in TRAINED
                    ]
                )
                training.taken += 1
            training.check()
            assert training.reduced() == set(TRAINED)


def check_averages_of_parameters_between_hosts_are_refused() -> None:
    """Masters would be copied over the averages."""
    for wrap, options in (
        (hvd.DistributedOptimizer, {"compression": hvd.Compression.rotate(2)}),
        (hvd.LocalSGD, {"every": 2}),
        (hvd.DiLoCo, {"every": 2}),
    ):
        with apart():
            training = _Mixed(wrap, **options)
            training.put_masters()
            training.backward()
            message = raised(ValueError, training.optimizer.synchronize)
            assert "master weights have taken the place of the parameter first" in message


def check_adasum_combines_the_steps_of_masters() -> None:
    training = _Mixed(op=hvd.Adasum)
    training.put_masters()
    for _ in range(3):
        training.clear()
        training.backward()
        training.copy_gradients()
        training.optimizer.step()
        training.copy_masters()
        for name in TRAINED:
            steps = [
                -RATES[name] * _gradient(name, rank, training.taken) for rank in range(hvd.size())
            ]
            training.expected[name] += adasum_of(steps)
        training.taken += 1
        training.check(tolerance=1e-5)
    assert list(training.optimizer._reducer.named.values()) == ["first", "norm", "last"]
