"""Scripts with a GradScaler, and those that change gradients while these are being averaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from local_training import kinds
from patterns import apart, assert_job_usable, raised
from sloping_training import Training
from torch import nn
from turns import RATE, SHAPES, slope
from worlds import world_with

import perseus.torch.horovod as hvd

SCALE = 1024.0
MOST = 0.5  # the norm to which gradients are clipped
# Like DistributedOptimizer's own, in ways that let a scaler find its gradients elsewhere.
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.SGD,
    lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True),
]


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)


def _compute(training: Training, scaler: torch.amp.GradScaler, factor: float = 1.0) -> None:
    training.optimizer.zero_grad()
    for name, parameter in training.parameters.items():
        numbers = slope(name, hvd.rank(), training.taken) * factor
        scaler.scale((parameter * numbers).sum()).backward()
    training.taken += 1


def _average(step: int) -> list[torch.Tensor]:
    stacked = {
        name: torch.stack([slope(name, rank, step) for rank in range(hvd.size())])
        for name in SHAPES
    }
    return [values.mean(0) for values in stacked.values()]


def _expect(training: Training, steps: list[int], clipped: bool = False) -> None:
    expected = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in steps:
        gradients = _average(step)
        norm = torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in gradients]))
        factor = MOST / norm if clipped else 1.0
        for value, gradient in zip(expected, gradients, strict=True):
            value.sub_(gradient * RATE * factor)
    for value, wanted in zip(training.values(), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


def check_a_scaler_divides_averages() -> None:
    """And what a script clips after unscale_() is averages."""
    for inner, clips in itertools.product(OPTIMIZERS, (False, True)):
        training, scaler = Training(hvd.DistributedOptimizer, inner=inner), _scaler()
        for step in range(4):
            _compute(training, scaler)
            if clips:
                scaler.unscale_(training.optimizer)
                nn.utils.clip_grad_norm_(training.parameters.values(), MOST)
            scaler.step(training.optimizer)
            scaler.update()
            _expect(training, [*range(step + 1)], clipped=clips)
        assert training.equal_everywhere()


def check_scripts_may_synchronize_themselves() -> None:
    """As Horovod's examples do. What is reduced twice would be size times as large."""
    for inner, unscales in itertools.product(OPTIMIZERS, (True, False)):
        training = Training(hvd.DistributedOptimizer, inner=inner, op=hvd.Sum)
        scaler = _scaler()
        for _ in range(3):
            _compute(training, scaler, 1.0 / hvd.size())
            training.optimizer.synchronize()
            if unscales:
                scaler.unscale_(training.optimizer)
            with training.optimizer.skip_synchronize():
                scaler.step(training.optimizer)
            scaler.update()
        _expect(training, [0, 1, 2])


def check_an_overflow_on_one_rank_leaves_out_the_step_on_all() -> None:
    for inner in OPTIMIZERS:
        training, scaler = Training(hvd.DistributedOptimizer, inner=inner), _scaler()
        for step in range(4):
            _compute(training, scaler, float("inf") if step == 1 and hvd.rank() == 0 else 1.0)
            scaler.step(training.optimizer)
            scaler.update()
            assert scaler.get_scale() == (SCALE if step == 0 else SCALE / 2)
        _expect(training, [0, 2, 3])


def check_an_overflow_on_one_rank_leaves_out_a_step_of_adasum_on_all() -> None:
    """A rank that took its step alone would wait for the others."""
    nobody, everybody, one = (lambda _: False), (lambda _: True), (lambda rank: rank == 0)
    for inner, unscales in itertools.product(OPTIMIZERS, (nobody, everybody, one)):
        training = Training(hvd.DistributedOptimizer, inner=inner, op=hvd.Adasum)
        scaler = _scaler()
        for step in range(4):
            before = [value.clone() for value in training.values()]
            overflows = step == 1 and hvd.rank() == hvd.size() - 1
            _compute(training, scaler, float("inf") if overflows else 1.0)
            if unscales(hvd.rank()):
                scaler.unscale_(training.optimizer)
            scaler.step(training.optimizer)
            scaler.update()
            assert all(map(torch.equal, before, training.values())) == (step == 1), step
            assert scaler.get_scale() == (SCALE if step == 0 else SCALE / 2)
            assert training.equal_everywhere()


def check_a_step_after_one_that_was_left_out_reduces() -> None:
    """Even where this rank computes no gradient for it, and others do."""
    for scaled, zeroed_by_optimizer in itertools.product((True, False), repeat=2):
        training, scaler = Training(hvd.DistributedOptimizer, op=hvd.Sum), _scaler()
        _compute(training, scaler, float("nan"))
        scaler.step(training.optimizer)
        scaler.update()
        if zeroed_by_optimizer:
            training.optimizer.zero_grad(set_to_none=False)
        for parameter in training.parameters.values():
            parameter.grad.zero_()
        factor = scaler.get_scale() if scaled else 1.0
        if hvd.rank() == 0:
            (training.parameters["w"] * 3.0 * factor).sum().backward()
        if scaled:
            scaler.step(training.optimizer)
            scaler.update()
        else:
            training.optimizer.step()
        values = training.values()
        torch.testing.assert_close(values[0], torch.full(SHAPES["w"], -3.0 * RATE))
        assert not any(value.any() for value in values[1:])


def check_a_disabled_scaler_lets_averages_be_clipped() -> None:
    """As where a script is run without mixed precision, or without a GPU."""
    training = Training(hvd.DistributedOptimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        _compute(training, scaler)
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.parameters.values(), MOST)
        scaler.step(training.optimizer)
        scaler.update()
    _expect(training, [0, 1, 2], clipped=True)


def check_synchronize_after_unscaling_reduces_nothing_again() -> None:
    for wrap in (hvd.DistributedOptimizer, partial(hvd.LocalSGD, every=2)):
        options = {"op": hvd.Sum} if wrap is hvd.DistributedOptimizer else {}
        training, scaler = Training(wrap, **options), _scaler()
        for _ in range(4):
            _compute(training, scaler, 1.0 / hvd.size() if options else 1.0)
            scaler.unscale_(training.optimizer)
            training.optimizer.synchronize()
            with training.optimizer.skip_synchronize():
                scaler.step(training.optimizer)
            scaler.update()
        hvd.synchronize_parameters()
        _expect(training, [0, 1, 2, 3])


def check_sums_of_steps_are_divided_once_they_are_complete() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        training, scaler = Training(hvd.DistributedOptimizer), _scaler()
        for step in range(4):
            _compute(training, scaler)
            if step % 2 == 0:
                training.optimizer.step()
            else:
                scaler.step(training.optimizer)
                scaler.update()
        _expect(training, [0, 1, 2, 3])


def check_hosts_that_exchange_parameters_may_leave_out_steps_alone() -> None:
    rotating = (hvd.DistributedOptimizer, {"compression": hvd.Compression.rotate(4)})
    for wrap, options in (rotating, *kinds()):
        with apart():
            training, scaler = Training(wrap, **options), _scaler()
            for step in range(8):
                overflows = step in {3, 7} and hvd.rank() == 0
                _compute(training, scaler, float("inf") if overflows else 1.0)
                scaler.step(training.optimizer)
                scaler.update()
            assert all(bool(value.isfinite().all()) for value in training.values())
            assert scaler.get_scale() == (SCALE / 4 if hvd.rank() == 0 else SCALE)
            hvd.synchronize_parameters()
            assert training.equal_everywhere()


def check_gradients_that_change_while_they_are_averaged_are_refused() -> None:
    def clip(training: Training) -> None:
        nn.utils.clip_grad_norm_(training.parameters.values(), MOST)

    def halve(training: Training) -> None:
        training.parameters["w"].grad.mul_(0.5)

    for change, options in itertools.product((clip, halve), ({}, {"groups": 2})):
        training = Training(hvd.DistributedOptimizer, **options)
        training.step()
        training.compute()
        for parameter in training.parameters.values():
            parameter.grad.square().sum()  # as a script that logs norms does; it changes nothing
        training.optimizer.step()
        training.compute()
        change(training)
        text = raised(ValueError, training.optimizer.step)
        assert "changed in place" in text and "skip_synchronize" in text, text
        training.step()
        training.compute()
        training.optimizer.synchronize()
        change(training)
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
        assert training.equal_everywhere()
    assert_job_usable()


def check_what_replaces_gradients_under_way_makes_their_change_no_error() -> None:
    training = Training(hvd.DistributedOptimizer)
    training.step()
    saved = training.saved()
    training.compute()
    nn.utils.clip_grad_norm_(training.parameters.values(), MOST)
    training.load(saved)
    training.optimizer.zero_grad()
    training.taken = 1
    training.step()
    _expect(training, [0, 1])


class _Doubling(hvd.Compression.none):
    """Changes what it is given, as error feedback in place does."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.mul_(2.0), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        del ctx
        return tensor / 2.0


def check_a_compressor_may_change_gradients() -> None:
    training = Training(hvd.DistributedOptimizer, compression=_Doubling)
    for _ in range(3):
        training.step()
    _expect(training, [0, 1, 2])
