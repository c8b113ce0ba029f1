"""The variables about gradients with DistributedTrainer and DistributedOptimizer.

Those about how gradients travel are in mx_gradient_checks.
"""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_training import raised
from mxnet import autograd
from mxnet.contrib.amp.loss_scaler import LossScaler
from worlds import world_with

import perseus.mxnet as hvd
from perseus.mxnet import kvstore, optimizer, trainer


class _Stepper:
    """A trainer whose parameters' gradients are what it is given."""

    def __init__(self, **options: object) -> None:
        self.parameters = []
        for index, shape in enumerate(settings.SHAPES):
            parameter = mx.gluon.Parameter(f"p{index}", shape=shape)
            parameter.initialize(mx.init.Zero())
            self.parameters.append(parameter)
        self.trainer = hvd.DistributedTrainer(
            self.parameters, "sgd", {"learning_rate": 1.0}, **options
        )

    def backward(self, coefficients: settings.Arrays) -> None:
        with autograd.record():
            terms = zip(self.parameters, coefficients, strict=True)
            loss = mx.nd.add_n(*((p.data() * mx.nd.array(c)).sum() for p, c in terms))
        loss.backward()

    def sums(self, coefficients: settings.Arrays) -> settings.Arrays:
        self.backward(coefficients)
        self.trainer.allreduce_grads()
        return [parameter.grad().asnumpy() * hvd.size() for parameter in self.parameters]

    def values(self) -> settings.Arrays:
        return [parameter.data().asnumpy() for parameter in self.parameters]


def _mean(step: int) -> settings.Arrays:
    everybody = [settings.whole(rank, step) for rank in range(hvd.size())]
    return [sum(arrays) / hvd.size() for arrays in zip(*everybody, strict=True)]


def _told(module: ModuleType, told: list[float]) -> object:
    """Record the rates that a module tells to the core."""
    plain = module.learning_rate

    def learning_rate(*arguments: object) -> float:
        told.append(plain(*arguments))
        return told[-1]

    return mock.patch.object(module, "learning_rate", learning_rate)


def _falling() -> mx.optimizer.Optimizer:
    """Rates of 1, 1/2 and 1/4."""
    schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0)
    return mx.optimizer.SGD(learning_rate=1.0, lr_scheduler=schedule, wd=0.0)


def check_a_schedule_gives_the_rate_of_the_present_step() -> None:
    """Also to weights that come one by one; and it goes on as ever."""
    stepper, told = _Stepper(), []
    stepper.trainer = hvd.DistributedTrainer(stepper.parameters, _falling())
    with _told(trainer, told):
        for step in range(3):
            stepper.backward(settings.whole(hvd.rank(), step))
            stepper.trainer.step(1)
    assert [rate / told[0] for rate in told] == [1, 0.5, 0.25], told

    mx.nd.waitall()  # the next optimizer has the same names
    weights, told = [mx.nd.zeros((4,)) for _ in range(2)], []
    gradients = [mx.nd.ones((4,)) for _ in range(2)]
    distributed = hvd.DistributedOptimizer(_falling())
    with _told(optimizer, told):
        for _ in range(3):
            for index, weight in enumerate(weights):
                distributed.update(index, weight, gradients[index], None)
    assert [rate / told[0] for rate in told] == [1, 1, 0.5, 0.5, 0.25, 0.25], told
    assert all((weight.asnumpy() == -1.75).all() for weight in weights)

    kv, told = mx.kv.create("dist_sync_perseus"), []
    kv.init(["schedule0", "schedule1"], [mx.nd.zeros((4,))] * 2)
    kv.set_optimizer(_falling())
    with _told(kvstore, told):
        for _ in range(3):
            for key in ("schedule0", "schedule1"):
                kv.push(key, mx.nd.ones((4,)))
    assert [rate / told[0] for rate in told] == [1, 1, 0.5, 0.5, 0.25, 0.25], told
    kv.pull("schedule1", weights[1])
    assert (weights[1].asnumpy() == -1.75 * hvd.size()).all()


def check_a_schedule_is_asked_for_no_later_step() -> None:
    """Parameters that are trained in turn have been updated differently often."""
    results = []
    for make in (hvd.DistributedTrainer, mx.gluon.Trainer):
        parameters = [mx.gluon.Parameter(f"turn{index}", shape=(3,)) for index in range(2)]
        for parameter in parameters:
            parameter.initialize(mx.init.Zero())
        schedule = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=1.0)
        options = {"learning_rate": 1.0, "lr_scheduler": schedule}
        stepper = make(parameters, "sgd", options)
        for parameter in [parameters[1]] * 3 + [parameters[0]] * 3:
            with autograd.record():
                loss = (parameter.data() * 2).sum()
            loss.backward()
            stepper.step(1, ignore_stale_grad=True)
        results.append([parameter.data().asnumpy() for parameter in parameters])
    assert (results[1][0] == -6).all()
    np.testing.assert_array_equal(*results)


def check_compression_of_a_trainer_outdoes_the_settings() -> None:
    given = settings.normal(hvd.rank(), 0)
    exact = [
        np.sum(arrays, axis=0, dtype=np.float64)
        for arrays in zip(*(settings.normal(rank, 0) for rank in range(hvd.size())), strict=True)
    ]

    def error(compression: type) -> float:
        results = _Stepper(compression=compression).sums(given)
        pairs = zip(results, exact, strict=True)
        return max(float(np.abs(mine - right).max()) for mine, right in pairs)

    with settings.apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        assert error(hvd.Compression.none) < 1e-5
        assert 1e-5 < error(hvd.Compression.fp16) < 1e-2
        assert error(hvd.Compression.settings) > 1e-2
    with settings.apart():
        assert 1e-3 < error(hvd.Compression.bf16) < 1e-1
        assert error(hvd.Compression.int8) > 1e-2
        assert error(hvd.Compression.topk(0.01)) > 1


def check_allgather_stacks_where_it_is_told_to() -> None:
    rows = [np.arange(3, dtype=np.float32) + 10 * r for r in range(hvd.size())]
    for stacks, expected in ((0, np.stack(rows)), (1, np.concatenate(rows))):
        with world_with(PERSEUS_CHANGE_HVD_ALLGATHER=stacks):
            mine = mx.nd.array(rows[hvd.rank()])
            np.testing.assert_array_equal(hvd.allgather(mine).asnumpy(), expected)
            (gathered,) = hvd.grouped_allgather([mine])
            np.testing.assert_array_equal(gathered.asnumpy(), expected)
            assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]


def check_sums_over_steps() -> None:
    """PERSEUS_ACCUMULATE_N_STEPS: every third step is taken, with the sum of three gradients."""
    for options in ({}, {"num_groups": 1}):
        with world_with(PERSEUS_ACCUMULATE_N_STEPS=3):
            stepper = _Stepper(**options)
            total = [np.zeros(shape, np.float32) for shape in settings.SHAPES]
            for step in range(7):
                stepper.backward(settings.whole(hvd.rank(), step))
                stepper.trainer.step(1)
                if step % 3 == 2:
                    for late in range(step - 2, step + 1):
                        total = [a - g for a, g in zip(total, _mean(late), strict=True)]
                assert all(map(np.array_equal, stepper.values(), total)), step
            assert stepper.trainer.optimizer.num_update == 2


def check_sums_begin_anew_where_parameters_are_frozen_or_not() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        stepper = _Stepper()
        first = stepper.parameters[0]
        total = [np.zeros(shape, np.float32) for shape in settings.SHAPES]

        def step(number: int) -> None:
            stepper.backward(settings.whole(hvd.rank(), number))
            stepper.trainer.step(1)

        for number, (grad_req, lasts) in enumerate(
            (("write", []), ("null", []), ("null", [1, 0]), ("null", []), ("write", []))
        ):
            first.grad_req = grad_req
            step(number)
            for late in lasts:
                for index in range(1, len(total)):
                    total[index] = total[index] - _mean(number - late)[index]
            assert all(map(np.array_equal, stepper.values(), total)), number
        step(5)
        for late in (4, 5):
            total = [a - g for a, g in zip(total, _mean(late), strict=True)]
        assert all(map(np.array_equal, stepper.values(), total))


def check_an_update_with_a_part_of_complete_sums_is_an_error() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
        optimizer.aggregate_num = 2
        update = mx.optimizer.get_updater(optimizer)
        weights, gradients = ([mx.nd.ones((3,)) for _ in range(2)] for _ in range(2))
        update([0], gradients[:1], weights[:1])
        message = raised(ValueError, lambda: update([0, 1], gradients, weights))
        assert "PERSEUS_ACCUMULATE_N_STEPS" in message
        assert all(weight.asnumpy().tolist() == [1, 1, 1] for weight in weights)


def check_sums_contain_gradients_that_are_stale_in_the_last_step() -> None:
    """Each rank uses one of two parameters, another one in the next step; nobody uses the last."""
    rank, size = hvd.rank(), hvd.size()
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        parameters = [mx.gluon.Parameter(f"p{i}", shape=(3,)) for i in range(4)]
        for parameter in parameters:
            parameter.initialize(mx.init.One())
        options = {"learning_rate": 1.0, "wd": 0.5}
        trainer = hvd.DistributedTrainer(parameters, "sgd", options)

        def step(used: int, factor: float) -> None:
            with autograd.record():
                loss = (parameters[used].data() * mx.nd.array([1, 2, 3])).sum() * factor
            loss.backward()
            trainer.step(1, ignore_stale_grad=True)

        expected = np.ones((4, 3))
        for first, last in ((rank % 2, 2), (2, 2)):  # the second sum has only the third parameter
            step(first, rank + 1)
            step(last, rank + 2)
            sums = np.zeros((4, 3))
            for each in range(size):
                used = each % 2 if first != 2 else 2
                sums[used] += (each + 1) * np.array([1, 2, 3]) / size
                sums[2] += (each + 2) * np.array([1, 2, 3]) / size
            updated = [0, 1, 2] if first != 2 else [2]
            expected[updated] -= sums[updated] + 0.5 * expected[updated]
            values = np.array([parameter.data().asnumpy() for parameter in parameters])
            np.testing.assert_allclose(values, expected, rtol=1e-6)


def check_sums_over_steps_of_an_optimizer() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        inner = mx.optimizer.create("sgd", learning_rate=1.0)
        update = mx.optimizer.get_updater(hvd.DistributedOptimizer(inner))
        weight, total = mx.nd.zeros(settings.SHAPES[0]), np.zeros(settings.SHAPES[0])
        for step in range(4):
            update(0, mx.nd.array(settings.whole(hvd.rank(), step)[0]), weight)
            if step % 2:
                total = total - _mean(step - 1)[0] - _mean(step)[0]
            assert np.array_equal(weight.asnumpy(), total), step
        assert inner.num_update == 2


def _with_nan(step: int) -> settings.Arrays:
    """A gradient that has one on the last rank."""
    arrays = settings.whole(hvd.rank(), step)
    if hvd.rank() == hvd.size() - 1:
        arrays[1][7] = np.nan
    return arrays


def check_a_nan_is_reported_or_raised() -> None:
    last = hvd.size() - 1
    for action in ("report", "raise"):
        with (
            world_with(PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION=action),
            settings.captured_stderr() as text,
        ):
            stepper = _Stepper()
            stepper.backward(_with_nan(0))
            if action == "raise":
                message = raised(mx.MXNetError, lambda s=stepper: (s.trainer.step(1), s.values()))
                assert f"on rank {last}" in message, message
                stepper.backward(_whole(1))
                stepper.trainer.step(1)
                expected = [-gradient for gradient in _mean(1)]
                assert all(map(np.array_equal, stepper.values(), expected))
                continue
            stepper.trainer.step(1)
            assert np.isnan(stepper.values()[1]).nonzero()[0].tolist() == [7]
            assert any("NaN in the gradient" in line for line in text().splitlines()), text()


def check_a_step_with_a_nan_is_skipped() -> None:
    """All of it on all ranks, and nothing else."""
    for options in ({}, {"num_groups": 1}):
        with (
            world_with(PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip"),
            settings.captured_stderr(),
        ):
            stepper = _Stepper(**options)
            total = [np.zeros(shape, np.float32) for shape in settings.SHAPES]
            for step in range(4):
                bad = step == 1
                stepper.backward((_with_nan if bad else _whole)(step))
                stepper.trainer.step(1)
                if not bad:
                    total = [a - g for a, g in zip(total, _mean(step), strict=True)]
                assert all(map(np.array_equal, stepper.values(), total)), step
            optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
            ones = mx.nd.ones((1,))
            message = raised(ValueError, lambda: optimizer.update(0, ones, ones, None))  # noqa: B023
            assert "DistributedTrainer" in message


def check_a_nan_lowers_the_loss_scale_on_all_ranks() -> None:
    """As an overflow, which is an Inf on all ranks, since MXNet adds it up."""
    with (
        world_with(PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip"),
        settings.captured_stderr(),
    ):
        stepper = _Stepper()
        # As amp.init_trainer does.
        scaler = stepper.trainer._amp_loss_scaler = LossScaler()
        first, scales = scaler.loss_scale, []
        for step in range(4):
            stepper.backward((_with_nan if step < 2 else _whole)(step))
            stepper.trainer.step(1)
            scales.append(scaler._next_loss_scale / first)
        assert scales == [0.5, 0.25, 0.25, 0.25], scales
        assert (scaler.loss_scale, scaler._unskipped) == (first / 4, 2)
        total = [-a - b for a, b in zip(_mean(2), _mean(3), strict=True)]
        assert all(map(np.array_equal, stepper.values(), total))


def _whole(step: int) -> settings.Arrays:
    return settings.whole(hvd.rank(), step)


def check_a_slow_rank_is_named() -> None:
    with (
        world_with(PERSEUS_PERF_CHECK_N_STEPS=2),
        settings.captured_stderr() as text,
    ):
        stepper = _Stepper()
        slow = settings.SlowRank(text)
        while not slow.named:
            slow.before_step()
            stepper.sums(_whole(0))
            slow.after_step()


def check_training_becomes_silent() -> None:
    """PERSEUS_OFFLINE_NEG: the right sums, and nothing is sent but data."""
    with world_with(PERSEUS_OFFLINE_NEG=1):
        stepper = _Stepper()
        silence = settings.Silence()
        for step in range(200):
            results = stepper.sums(_whole(step))
            expected = [mean * hvd.size() for mean in _mean(step)]
            assert all(map(np.array_equal, results, expected)), step
            silence.after_step()
            if step % 8 == 7:
                silence.ask()
            if silence.reached:
                break
        assert silence.reached, silence.sent
