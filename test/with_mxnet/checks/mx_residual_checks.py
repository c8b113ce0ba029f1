"""What lossy codecs hold back is in files of states: of a DistributedTrainer and of a KVStore."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd

KEYS, SHAPES = ["w0", "w1"], [(64, 64), (40,)]
STEPS = 3


class _Trainer:
    """Parameters from zero and a DistributedTrainer; their gradients are given."""

    def __init__(self, num_groups: int = 0) -> None:
        self.parameters = list(map(gluon.Parameter, KEYS, ["write"] * 2, SHAPES))
        for parameter in self.parameters:
            parameter.initialize(mx.init.Zero())
        self.trainer = hvd.DistributedTrainer(
            self.parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9},
            compression=hvd.Compression.topk(0.1), num_groups=num_groups,
        )  # fmt: skip

    def steps(self, first: int) -> list[np.ndarray]:
        """Some of them from a number on; the weights afterwards."""
        for step in range(first, first + STEPS):
            given = settings.normal(hvd.rank(), step)
            with autograd.record():
                terms = zip(self.parameters, given, strict=True)
                loss = mx.nd.add_n(*((p.data() * mx.nd.array(g)).sum() for p, g in terms))
            loss.backward()
            self.trainer.step(1)
        return [parameter.data().asnumpy() for parameter in self.parameters]

    def begin_at(self, weights: list[np.ndarray]) -> None:
        for parameter, values in zip(self.parameters, weights, strict=True):
            parameter.set_data(mx.nd.array(values))

    def save(self, path: Path) -> None:
        self.trainer.save_states(str(path))

    def load(self, path: Path) -> None:
        self.trainer.load_states(str(path))

    def held(self) -> dict[str, bytes]:
        self.trainer._exchange.wait()
        found = self.trainer._exchange.residuals.read()
        return {key: bytes(numbers) for key, (_, numbers) in found.items()}


class _Store:
    """A KVStore with weights from zero and an optimizer."""

    def __init__(self) -> None:
        self.kv = hvd.create()
        self.kv.set_gradient_compression({"type": "int8"})
        self.kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        self.kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES])

    def steps(self, first: int) -> list[np.ndarray]:
        order = (0, 1) if hvd.rank() == 0 else (1, 0)  # ranks pair keys by name
        for step in range(first, first + STEPS):
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
        found = self.kv._pushes.residuals.read()
        return {key: bytes(numbers) for key, (_, numbers) in found.items()}


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
        path = Path(folder) / "states"
        for make in (_Trainer, lambda: _Trainer(num_groups=1), _Store):
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
            if isinstance(again, _Trainer):  # its names are the same; a new store's are others
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
