"""Elastic training with MXNet: states go back to their commit, bit for bit, in a new world."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import gradient_settings as settings
import mxnet as mx
import numpy as np
import pytest
from mx_training import assert_close
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler

import perseus.mxnet as hvd
from perseus.elastic import HostUpdateResult, notification_manager
from perseus.gradients.outcome import Outcome
from perseus.gradients.plan import Plan
from perseus.mxnet.rotation import Weight
from perseus.mxnet.step_keys import StepKeys
from perseus.mxnet.weight_turns import WeightTurnsByKey

COMMITTED, STEPS = 2, 5


class _Network(gluon.Block):
    """Two weights, whose gradients are what it is called with."""

    def __init__(self, seed: int) -> None:
        super().__init__(prefix="")
        for name, shape in (("w0", (64, 64)), ("w1", (40,))):
            parameter = self.params.get(name, shape=shape)
            parameter.initialize(mx.init.Constant(float(seed)))
            setattr(self, name, parameter)

    def forward(self, first: Any, second: Any) -> Any:
        return (self.w0.data() * first).sum() + (self.w1.data() * second).sum()


class _Training:
    """Momenta and residuals: whatever is lost shows in later weights."""

    def __init__(self, seed: int) -> None:
        self.net = _Network(seed)
        self.optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
        self.trainer = hvd.DistributedTrainer(
            self.net.collect_params(), self.optimizer, compression=hvd.Compression.topk(0.1)
        )

    def step(self, number: int) -> None:
        with autograd.record():
            loss = self.net(*map(mx.nd.array, settings.normal(hvd.rank(), number)))
        loss.backward()
        self.trainer.step(1)

    def weights(self) -> str:
        """Of all bits, a digest."""
        return _digest(parameter.data() for parameter in self.net.collect_params().values())

    def held(self) -> bool:
        """Whether anything is."""
        return any(any(numbers) for _, numbers in self.trainer.residuals().values())

    def state(self) -> Any:
        return hvd.elastic.MXNetState(self.net, self.trainer, step=0)

    def optimizer_in_use(self) -> mx.optimizer.Optimizer:
        return self.trainer._optimizer


class _ModuleTraining:
    """The same with a Module."""

    def __init__(self, seed: int) -> None:
        shapes = [("w0", (1, 64, 64)), ("w1", (1, 40))]  # of batches of one
        terms = [mx.sym.sum(mx.sym.var(n, shape=s) * mx.sym.var("for_" + n)) for n, s in shapes]
        names = [f"for_{name}" for name, _ in shapes]
        self.module = mx.mod.Module(mx.sym.MakeLoss(mx.sym.add_n(*terms)), names, None)
        self.module.bind(list(zip(names, (shape for _, shape in shapes), strict=True)))
        first = {name: mx.nd.full(shape, seed) for name, shape in shapes}
        self.module.init_params(arg_params=first)
        self.optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
        self.module.init_optimizer(None, hvd.DistributedOptimizer(self.optimizer))

    def step(self, number: int) -> None:
        given = [mx.nd.array([array]) for array in settings.normal(hvd.rank(), number)]
        self.module.forward_backward(mx.io.DataBatch(given))
        self.module.update()

    def weights(self) -> str:
        return _digest(array for part in self.module.get_params() for array in part.values())

    def held(self) -> bool:
        return any(any(numbers) for _, numbers in self.module._optimizer.residuals().values())

    def state(self) -> Any:
        return hvd.elastic.MXNetState(self.module, step=0)

    def optimizer_in_use(self) -> mx.optimizer.Optimizer:
        return self.module._updater.optimizer._optimizer


def _digest(arrays: Iterable[Any]) -> str:
    content = b"".join(array.asnumpy().tobytes() for array in arrays)
    return hashlib.sha256(content).hexdigest()


def check_a_failure_goes_back_to_the_commit_with_everything() -> None:
    with settings.apart():  # so that codecs act
        _fail_and_go_on(_Training)


def check_a_module_goes_back_to_the_commit_with_everything() -> None:
    with settings.apart(LIGHT_TOPK_ALLREDUCE=1, LIGHT_TOPK_RATIO=0.1):
        _fail_and_go_on(_ModuleTraining)


def _fail_and_go_on(make: type[_Training | _ModuleTraining]) -> None:
    reference = make(0)
    seen = []
    for number in range(STEPS):
        reference.step(number)
        seen.append(reference.weights())
    assert reference.held()

    training = make(hvd.rank())  # sync makes them equal
    state = training.state()
    entered = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        entered.append(state.step)
        if len(entered) > 1:
            assert training.weights() == seen[COMMITTED - 1]
        while state.step < STEPS:
            training.step(state.step)
            after = training.weights()
            if len(entered) == 1 and state.step == COMMITTED:
                if hvd.rank() == hvd.size() - 1:
                    raise hvd.HorovodInternalError("failing on purpose")
                training.step(STEPS)  # an error that nobody waits for
                hvd.broadcast_object(0)
                raise AssertionError("a rank was missing, and nobody said so")
            state.step += 1
            assert after == seen[state.step - 1]
            state.commit()
        return "done"

    assert train(state) == "done"
    assert entered == [0, COMMITTED]
    assert training.optimizer_in_use() is training.optimizer  # which the script holds
    assert training.optimizer.num_update == STEPS


def check_fit_goes_on_after_a_failure_within_an_epoch() -> None:
    """As docs/elastic.md says; without the failure, the parameters would be the same."""
    expected = _fit(fails=False)
    assert not np.array_equal(expected, _fit(fails=False, epochs=1))
    assert np.array_equal(expected, _fit(fails=True))


def _fit(fails: bool, epochs: int = 3) -> Any:
    numbers = np.random.default_rng(hvd.rank()).normal(size=(64, 8)).astype(np.float32)
    data = mx.io.NDArrayIter(numbers, numbers.sum(1), 16, label_name="sum_label")
    line = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="line")
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(line, name="sum"), ["data"], ["sum_label"])
    module.bind(data.provide_data, data.provide_label)
    first = {"line_weight": mx.nd.full((1, 8), hvd.rank()), "line_bias": mx.nd.zeros((1,))}
    module.init_params(arg_params=first)
    optimizer = mx.optimizer.SGD(learning_rate=0.02, momentum=0.9, rescale_grad=1 / 16)
    module.init_optimizer(None, hvd.DistributedOptimizer(optimizer))
    state = hvd.elastic.MXNetState(module, epoch=0)
    left = [1, 0] if fails else []

    def after_batch(progress: Any) -> None:
        if left and (progress.epoch, progress.nbatch) == (1, 2):
            left.clear()
            if hvd.rank() == 0:
                raise hvd.HorovodInternalError("failing on purpose")
            hvd.broadcast_object(0)

    def after_epoch(epoch: int, *_: Any) -> None:
        state.epoch = epoch + 1
        state.commit()

    @hvd.elastic.run
    def train(state: Any) -> None:
        data.reset()
        module.fit(
            data, eval_metric="mse", begin_epoch=state.epoch, num_epoch=epochs,
            batch_end_callback=after_batch, epoch_end_callback=after_epoch,
        )  # fmt: skip

    train(state)
    assert state.epoch == epochs and not left
    return module.get_params()[0]["line_weight"].asnumpy()


def check_weights_take_turns_from_what_a_module_has_restored() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _ModuleTraining(hvd.rank())
        state = training.state()
        state.sync()
        training.step(0)
        state.save()
        saved = training.weights()
        training.step(1)
        training.step(2)
        state.restore()
        assert training.weights() == saved
        updater, optimizer = training.module._updater, training.module._optimizer
        assert sorted(optimizer._updated) == sorted(updater.states)
        for index, (_, momentum) in optimizer._updated.items():
            assert momentum is updater.states[index]


def check_a_step_that_is_cut_short_is_none() -> None:
    keys = StepKeys()
    for key in "abab":
        keys.begins(key)
    assert keys.is_complete() and not keys.give_up()
    assert keys.begins("a") and keys.give_up()
    assert keys.begins("a") and not keys.is_complete()
    assert not keys.begins("b") and keys.is_complete()


class _Turns(WeightTurnsByKey):
    """Keeps the numbers of steps with turns, and the keys that take them."""

    def __init__(self) -> None:
        super().__init__(Plan(), "keys", lambda _: Weight(None))
        self.taken: list[tuple[int, list[str]]] = []
        self._number = 0

    def take(self, keys: Sequence[str]) -> None:
        self.taken.append((self._number, list(keys)))

    def step(self, keys: str, others_update: bool) -> None:
        for key in keys:
            if others_update:
                self.before_others_update(key, applies=True)
            else:
                self.before_update(key)
                self.after_update(key, Outcome.REDUCED)
        self._number += 1


def check_weights_take_turns_in_a_new_world_as_those_of_a_new_rank() -> None:
    """After a last step with all keys, or some; the first turn waits for the second step."""
    for others_update, expected in (
        (False, [(1, ["a", "b"]), (1, ["a", "b"]), (2, ["a", "b"])]),
        (True, [(0, []), (1, ["a", "b"]), (2, ["a", "b"])]),
    ):
        for last in ("abc", "ab"):
            with settings.world_with():
                old = _Turns()
                for keys in ("abc", last):
                    old.step(keys, others_update)
            with settings.world_with():
                old._number, old.taken = 0, []
                new = _Turns()
                for _ in range(3):
                    for turns in (old, new):
                        turns.step("ab", others_update)
                assert old.taken == new.taken == expected


def check_sums_over_steps_end_with_their_world() -> None:
    """Neither may what they left out count as old, nor what they alone contained as new."""
    for by_hand in (False, True):
        for lost in ([0], [0, 1]):
            layers = [gluon.Parameter(f"layer{i}", shape=(3,)) for i in range(2)]
            for parameter in layers:
                parameter.initialize(mx.init.One())
            rates = {"learning_rate": 1.0, "wd": 0.5}
            with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
                trainer = hvd.DistributedTrainer(layers, "sgd", rates)
                expected = np.ones((2, 3))
                for used in ([0, 1], [0, 1], lost):
                    _pass(trainer, [layers[i] for i in used], by_hand)
                expected = 0.5 * expected - _slope()
            used = [0] if len(lost) == 2 else [0, 1]
            with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
                for _ in range(2):
                    _pass(trainer, [layers[i] for i in used], by_hand)
                expected[used] = 0.5 * expected[used] - _slope()
            assert_close([parameter.data().asnumpy() for parameter in layers], expected)


def _pass(trainer: hvd.DistributedTrainer, used: list[gluon.Parameter], by_hand: bool) -> None:
    with autograd.record():
        loss = mx.nd.add_n(*(parameter.data().sum() for parameter in used)) * (hvd.rank() + 1)
    loss.backward()
    if by_hand:
        trainer.allreduce_grads()
        trainer.update(1, ignore_stale_grad=True)
    else:
        trainer.step(1, ignore_stale_grad=True)


def _slope() -> float:
    """Of a loss in two passes, on average."""
    return 2 * np.mean(np.arange(hvd.size()) + 1.0)


def check_a_trainer_keeps_what_its_distributed_optimizer_wraps() -> None:
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    optimizer = mx.optimizer.SGD(learning_rate=1.0, momentum=0.5)
    wrapped = hvd.DistributedOptimizer(optimizer)
    trainer = gluon.Trainer(net.collect_params(), wrapped, kvstore=None)
    state = hvd.elastic.MXNetState(net, trainer)
    optimizer.momentum = 0.25
    state.restore()
    assert trainer._optimizer is wrapped and wrapped._optimizer is optimizer
    assert optimizer.momentum == 0.5


def check_changed_hosts_lose_no_step_that_is_under_way() -> None:
    with settings.apart():
        reference = _Training(0)
        for number in range(6):
            reference.step(number)
        expected = reference.weights()

        training = _Training(0)
        state = hvd.elastic.MXNetState(training.net, training.trainer, step=0)
        changes = iter([HostUpdateResult.added, HostUpdateResult.removed])

        @hvd.elastic.run
        def train(state: Any) -> str:
            for _ in range(2):
                training.step(state.step)  # nobody waits for it
                state.step += 1
            change = next(changes, None)
            if change is None:
                return "done"
            if hvd.rank() == 0:
                notification_manager.handle_hosts_updated(float(state.step), change)
            state.check_host_updates()
            raise AssertionError("nobody has interrupted")

        assert train(state) == "done"
        assert state.step == 6 and training.weights() == expected


def check_schedules_loss_scales_and_sums_go_back_in_place() -> None:
    rank = hvd.rank()
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    net.collect_params().setattr("grad_req", "add")
    schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0 + rank)
    optimizer = mx.optimizer.SGD(learning_rate=1.0 + rank, lr_scheduler=schedule)
    trainer = hvd.DistributedTrainer(net.collect_params(), optimizer)
    trainer._amp_loss_scaler = scaler = LossScaler()  # as amp.init_trainer does
    scaler._loss_scale, trainer._scale = 2.0**rank, 0.5**rank
    state = hvd.elastic.MXNetState(net, trainer)
    state.sync()
    state.save()
    assert (schedule.base_lr, scaler.loss_scale, trainer._scale) == (1.0, 1.0, 1.0)
    schedule.base_lr, scaler._loss_scale, trainer._scale = 7.0, 8.0, 9.0
    with autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    state.restore()
    assert (schedule.base_lr, scaler.loss_scale, trainer._scale) == (1.0, 1.0, 1.0)
    assert trainer._optimizer.lr_scheduler is schedule and trainer._amp_loss_scaler is scaler
    assert net.weight.grad().asscalar() == 0
    with autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    state.on_reset()  # where hosts have changed, nothing is restored
    assert net.weight.grad().asscalar() == 0


def check_errors_of_mxnet_in_a_whole_world_propagate() -> None:
    training = _Training(0)
    state = hvd.elastic.MXNetState(training.net, training.trainer)

    @hvd.elastic.run
    def train(state: Any) -> None:
        mx.nd.dot(mx.nd.ones((2, 3)), mx.nd.ones((2, 3)))

    with pytest.raises(mx.base.MXNetError, match="dot"):
        train(state)
    training.step(0)
    training.weights()


def check_a_sampler_shares_what_is_left() -> None:
    rank, size = hvd.rank(), hvd.size()
    data = gluon.data.SimpleDataset(list(range(6 * size)))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    loader = gluon.data.DataLoader(data, batch_size=2, sampler=sampler)
    state = hvd.elastic.MXNetState(sampler=sampler)
    sampler.record_batch(0, 2)
    state.save()
    sampler.record_batch(1, 2)
    state.restore()
    rest = [2 * size + rank + size * i for i in range(4)]
    assert np.concatenate([batch.asnumpy() for batch in loader]).tolist() == rest
    if rank != 0:
        sampler.set_epoch(3)
    state.sync()
    assert list(sampler) == rest and sampler.epoch == 0


def check_states_refuse_what_they_could_not_keep() -> None:
    net = gluon.nn.Dense(3)
    net.initialize()
    with pytest.raises(ValueError, match=r"no values yet: initialize\(\) the network and"):
        hvd.elastic.MXNetState(net)
    net(mx.nd.ones((1, 2)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=hvd.create("dist_sync_perseus"))
    with pytest.raises(ValueError, match="a trainer with a store cannot be a state"):
        hvd.elastic.MXNetState(net, trainer)
    with pytest.raises(ValueError, match="a dict as its net: give it gluon's or a Mod"):
        hvd.elastic.MXNetState({"weight": mx.nd.ones((2,))})
    module = mx.mod.Module(
        mx.sym.MakeLoss(mx.sym.var("data") * mx.sym.var("weight")), ["data"], None
    )
    module.bind([("data", (1,))])
    module.init_params()
    with pytest.raises(ValueError, match=r"not ready to train: call bind\(\), init_params\(\) and"):
        hvd.elastic.MXNetState(module)
    module.init_optimizer(hvd.create("dist_sync_perseus"))
    with pytest.raises(ValueError, match="a module with a store cannot be a state"):
        hvd.elastic.MXNetState(module)
    split = mx.mod.Module(module.symbol, ["data"], None, context=[mx.cpu(0), mx.cpu(1)])
    split.bind([("data", (2,))])
    split.init_params(arg_params={"weight": mx.nd.ones((1,))})
    split.init_optimizer(None, hvd.DistributedOptimizer(mx.optimizer.SGD()))
    with pytest.raises(ValueError, match="has 2 devices, expected one: start a rank for each"):
        hvd.elastic.MXNetState(split)
