"""What lossy codecs hold back is in files of states: of a trainer, a KVStore and an optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd

KEYS, SHAPES = ["w0", "w1"], [(64, 64), (40,)]
STEPS = 3


class _Trainer:
    """Parameters from zero and a DistributedTrainer; their gradients are given."""

    def __init__(self, num_groups: int = 0, momentum: float = 0.9) -> None:
        self.parameters = list(map(gluon.Parameter, KEYS, ["write"] * 2, SHAPES))
        for parameter in self.parameters:
            parameter.initialize(mx.init.Zero())
        self.trainer = hvd.DistributedTrainer(
            self.parameters, "sgd", {"learning_rate": 0.1, "momentum": momentum},
            compression=hvd.Compression.topk(0.1), num_groups=num_groups,
        )  # fmt: skip
        self.optimizer = self.trainer._optimizer
        self.batch = 1

    def go_on_with(self, rate: float, batch: int) -> None:
        """Let the next steps have another learning rate and batch size."""
        self.optimizer.set_learning_rate(rate)
        self.batch = batch

    def steps(self, first: int, count: int = STEPS) -> list[np.ndarray]:
        """Some of them from a number on; the weights afterwards."""
        for step in range(first, first + count):
            given = settings.normal(hvd.rank(), step)
            with autograd.record():
                terms = zip(self.parameters, given, strict=True)
                loss = mx.nd.add_n(*((p.data() * mx.nd.array(g)).sum() for p, g in terms))
            loss.backward()
            self.update(step)
        return [parameter.data().asnumpy() for parameter in self.parameters]

    def update(self, step: int) -> None:
        self.trainer.step(self.batch)

    def begin_at(self, weights: list[np.ndarray]) -> None:
        for parameter, values in zip(self.parameters, weights, strict=True):
            parameter.set_data(mx.nd.array(values))

    def save(self, path: Path) -> None:
        self.trainer.save_states(str(path))

    def load(self, path: Path) -> None:
        self.trainer.load_states(str(path))

    def held(self) -> dict[str, bytes]:
        self.trainer._reducer.wait()
        found = self.trainer._reducer.residuals.read()
        return {key: bytes(numbers) for key, (_, numbers) in found.items()}


class _TrainerWithUpdates(_Trainer):
    """Some steps are split into allreduce_grads() and update()."""

    split: frozenset[int] = frozenset()

    def update(self, step: int) -> None:
        if step not in self.split:
            self.trainer.step(self.batch)
        else:
            self.trainer.allreduce_grads()
            self.trainer.update(self.batch)


class _WithOptimizer:
    optimizer: Any

    def go_on_with(self, rate: float, batch: int) -> None:
        """See _Trainer."""
        self.optimizer.set_learning_rate(rate)
        self.optimizer.rescale_grad = 1 / batch


class _Store(_WithOptimizer):
    """A KVStore with weights from zero and an optimizer."""

    def __init__(self, momentum: float = 0.9) -> None:
        self.kv = hvd.create()
        self.kv.set_gradient_compression({"type": "int8"})
        self.optimizer = mx.optimizer.create("sgd", learning_rate=0.1, momentum=momentum)
        self.kv.set_optimizer(self.optimizer)
        self.kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES])

    def steps(self, first: int, count: int = STEPS) -> list[np.ndarray]:
        order = (0, 1) if hvd.rank() == 0 else (1, 0)  # ranks pair keys by name
        for step in range(first, first + count):
            given = settings.normal(hvd.rank(), step)
            for index in order:
                self.kv.push(KEYS[index], mx.nd.array(given[index]))
        outs = [mx.nd.zeros(shape) for shape in SHAPES]
        self.kv.pull(KEYS, outs)
        return [out.asnumpy() for out in outs]

    def begin_at(self, weights: list[np.ndarray]) -> None:
        self.kv.init(KEYS, [mx.nd.array(values) for values in weights])

    def save(self, path: Path) -> None:
        self.kv.save_optimizer_states(str(path))

    def load(self, path: Path) -> None:
        self.kv.load_optimizer_states(str(path))

    def held(self) -> dict[str, bytes]:
        self.kv._wait()
        found = self.kv._reducer.residuals.read()
        return {key: bytes(numbers) for key, (_, numbers) in found.items()}


class _Updater(_WithOptimizer):
    """A loop of one's own with a DistributedOptimizer; the updater's file has it all."""

    num_groups = 0

    def __init__(self, momentum: float = 0.9) -> None:
        inner = mx.optimizer.create("sgd", learning_rate=0.1, momentum=momentum)
        self.optimizer = optimizer = hvd.DistributedOptimizer(inner, num_groups=self.num_groups)
        self.updater = mx.optimizer.get_updater(optimizer)
        self.weights = [mx.nd.zeros(shape) for shape in SHAPES]
        self.gradients = [mx.nd.zeros(shape) for shape in SHAPES]

    def steps(self, first: int, count: int = STEPS) -> list[np.ndarray]:
        for step in range(first, first + count):
            given = settings.normal(hvd.rank(), step)
            for gradient, numbers in zip(self.gradients, given, strict=True):
                gradient[:] = numbers
            if self.num_groups:
                self.updater(list(range(len(given))), self.gradients, self.weights)
            else:
                for index, gradient in enumerate(self.gradients):
                    self.updater(index, gradient, self.weights[index])
        return [weight.asnumpy() for weight in self.weights]

    def begin_at(self, weights: list[np.ndarray]) -> None:
        self.weights = [mx.nd.array(values) for values in weights]

    def save(self, path: Path) -> None:
        path.write_bytes(self.updater.get_states(dump_optimizer=True))

    def load(self, path: Path) -> None:
        self.updater.set_states(path.read_bytes())

    def held(self) -> dict[str, bytes]:
        reducer = self.updater.optimizer._reducer
        reducer.wait()
        return {key: bytes(numbers) for key, (_, numbers) in reducer.residuals.read().items()}


class _GroupedUpdater(_Updater):
    num_groups = 1


class _UpdaterOfModule(_Updater):
    """Module.save_optimizer_states has the states alone."""

    def save(self, path: Path) -> None:
        path.write_bytes(self.updater.get_states())
        self.updater.optimizer.save_residuals(f"{path}.residuals")

    def load(self, path: Path) -> None:
        self.updater.set_states(path.read_bytes())
        self.updater.optimizer.load_residuals(f"{path}.residuals")


@contextmanager
def _folder() -> Iterator[Path]:
    """One for all ranks, there until all are done."""
    with tempfile.TemporaryDirectory() as mine:
        yield Path(settings.control.gather_lines(mine, "folder")[0])
        settings.control.barrier()


def _same(actual: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, actual, expected))


def check_training_goes_on_bit_by_bit() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        for make in (_Trainer, lambda: _Trainer(num_groups=1), _Store):
            _goes_on(make, Path(folder) / "states")


def check_training_with_an_optimizer_goes_on_bit_by_bit() -> None:
    """With the codecs of the settings."""
    for codec in (
        {"PERSEUS_ALLREDUCE_CODEC": "int8"},
        {"LIGHT_TOPK_ALLREDUCE": 1, "LIGHT_TOPK_RATIO": 0.1, "LIGHT_TOPK_THRESHOLD": 1},
    ):
        with settings.apart(**codec), tempfile.TemporaryDirectory() as folder:
            for make in (_Updater, _GroupedUpdater, _UpdaterOfModule):
                _goes_on(make, Path(folder) / "states")


def _goes_on(make: Callable[[], Any], path: Path) -> None:
    """Training for as many steps again, through a file, is training for all of them."""
    whole = make()
    weights = whole.steps(0)
    whole.save(path)
    held = whole.held()
    assert held and all(any(numbers) for numbers in held.values())
    expected = whole.steps(STEPS)
    after = whole.held()
    assert after != held
    again = make()
    again.begin_at(weights)
    if not isinstance(again, _Store):  # its names are the same; a new store's are others
        again.load(path)
        assert again.held() == held
        assert _same(again.steps(STEPS), expected)
        assert again.held() == after
    whole.begin_at(weights)
    whole.load(path)
    assert whole.held() == held
    assert _same(whole.steps(STEPS), expected)
    assert whole.held() == after
    settings.assert_same_everywhere(expected)


def check_what_is_held_moves_weights_as_when_it_was_held() -> None:
    """Whatever the learning rate and the batch size are when it arrives."""
    rates = [0.1] * STEPS + [0.05] * STEPS + [0.1]
    batches = [1] * STEPS + [4] * STEPS + [2]
    with settings.apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        for make in (_Trainer, _Store, _Updater, _GroupedUpdater):
            training = make(momentum=0.0)
            training.steps(0)
            training.go_on_with(rates[STEPS], batches[STEPS])
            weights = training.steps(STEPS)
            ranks = 1 if make is _Store else hvd.size()  # it sums, others average

            def expected(index: int, steps: int, ranks: int = ranks) -> np.ndarray:
                moved = [
                    rates[step]
                    / batches[step]
                    / ranks
                    * settings.normal(rank, step)[index].astype(float)
                    for step in range(steps)
                    for rank in range(hvd.size())
                ]
                return -np.sum(moved, axis=0)

            assert np.abs(weights[0] - expected(0, 2 * STEPS)).max() > 1e-5, make
            hvd.flush_residuals()
            training.go_on_with(rates[-1], batches[-1])
            for index, weight in enumerate(training.steps(2 * STEPS, 1)):
                np.testing.assert_allclose(weight, expected(index, len(rates)), atol=2e-6)


def check_what_is_held_keeps_its_weight_in_both_forms_of_a_step() -> None:
    """As where the norm of the gradients is looked at from time to time."""
    steps = 6
    sums = [
        sum(settings.normal(rank, step)[0].astype(float) for rank in range(hvd.size()))
        for step in range(steps)
    ]
    expected = -0.1 / 10 / hvd.size() * np.sum(sums, axis=0)
    for split in ({0}, {0, 1}, {2}, {2, 3}, {1, 3, 5}, set(range(steps))):
        with settings.apart():
            training = _TrainerWithUpdates(momentum=0.0)
            training.split = frozenset(split)
            training.go_on_with(0.1, 10)
            training.steps(0, steps - 1)
            hvd.flush_residuals()
            np.testing.assert_allclose(training.steps(steps - 1, 1)[0], expected, atol=1e-6)


def check_a_new_store_sends_at_once_what_it_loads() -> None:
    """Who owns which results depends on names, which have the store's number; nothing is lost."""
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states"
        first = _Store()
        weights = first.steps(0)
        first.save(path)
        held = first.held()
        for loads in (True, False):
            other = _Store()
            other.kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
            other.begin_at(weights)
            if loads:
                other.load(path)
                assert other.held() == held
                other.kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
            other.kv.push(KEYS, [mx.nd.zeros(shape) for shape in SHAPES])
            outs = [mx.nd.zeros(shape) for shape in SHAPES]
            other.kv.pull(KEYS, outs)
            for index, key in enumerate(KEYS):
                sent = weights[index] - outs[index].asnumpy()
                everybody = settings.control.gather_bytes(held[key], f"held.{key}", 0)
                parts = [np.frombuffer(row, np.float32).reshape(2, -1) for row in everybody]
                total = sum(part.sum(axis=0) for part in parts).reshape(SHAPES[index])
                np.testing.assert_allclose(sent, total if loads else 0, atol=1e-5)


def check_files_of_others_and_files_for_others() -> None:
    """Only the rank that wrote a file takes what it held; plain MXNet does not mind it."""
    for make in (_Trainer, _Store):
        with settings.apart(), _folder() as folder:
            ours = make()
            ours.steps(0)
            held = ours.held()
            if hvd.rank() == 0:
                ours.save(folder / "root")
            settings.control.barrier()
            ours.load(folder / "root")
            assert ours.held() == (held if hvd.rank() == 0 else {})
            updater = mx.optimizer.get_updater(mx.optimizer.create("sgd", momentum=0.9))
            updater.set_states((folder / "root").read_bytes())
            own = ours.kv._updater if make is _Store else ours.trainer._updaters[0]
            assert list(updater.states) == list(own.states) and len(own.states) == 2
            for key, state in own.states.items():
                assert np.array_equal(updater.states[key].asnumpy(), state.asnumpy())
            plain = folder / f"plain{hvd.rank()}"
            plain.write_bytes(updater.get_states(dump_optimizer=True))
            ours.load(plain)
            assert not ours.held()


def check_gluons_trainer_saves_what_its_optimizer_holds() -> None:
    """For the rank that wrote the file alone."""
    with settings.apart(PERSEUS_ALLREDUCE_CODEC="int8"), _folder() as folder:
        parameter = gluon.Parameter("w", shape=SHAPES[0])
        parameter.initialize(mx.init.Zero())
        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", momentum=0.9))
        trainer = gluon.Trainer([parameter], optimizer, kvstore=None)
        with autograd.record():
            loss = (parameter.data() * mx.nd.array(settings.normal(hvd.rank(), 0)[0])).sum()
        loss.backward()
        trainer.step(1)
        parameter.data().wait_to_read()
        held = optimizer._reducer.residuals.read()
        assert any(held["0"][1])
        if hvd.rank() == 0:
            trainer.save_states(str(folder / "root"))
        settings.control.barrier()
        trainer.load_states(str(folder / "root"))
        assert trainer.optimizer is not optimizer
        assert trainer.optimizer._reducer.residuals.read() == (held if hvd.rank() == 0 else {})


def check_files_are_as_ever_where_nothing_is_held() -> None:
    with tempfile.TemporaryDirectory() as folder:  # one host: nothing is coded
        path = Path(folder) / "states"
        for ours in (_Trainer(), _Store()):
            ours.steps(0)
            ours.save(path)
            is_store = isinstance(ours, _Store)
            own = ours.kv._updater if is_store else ours.trainer._updaters[0]
            assert path.read_bytes() == own.get_states(dump_optimizer=not is_store)
            ours.load(path)
