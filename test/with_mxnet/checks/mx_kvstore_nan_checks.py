"""A NaN skips whole steps of a KVStore, although it learns of them key by key."""

from __future__ import annotations

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_values import assert_equal, everyone, mine
from mxnet import autograd, gluon

import perseus.mxnet as hvd

KEYS, SHAPE, STEPS = ["a", "b", "c"], (5, 7), 6
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.9},
    "adam": {"learning_rate": 0.1},  # corrects by the number of updates
    "nadam": {"learning_rate": 0.1},  # multiplies a number of its own at every update
}


def _skipping(name: str = "PERSEUS_ALLREDUCE_NANCHECK", **more: object):
    return settings.world_with(**{name: 1}, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip", **more)


def _bad_key(step: int) -> str | None:
    """Steps 1 and 4 have a NaN, at first in the last key, then in the middle."""
    return {1: "c", 4: "b"}.get(step)


def _gradient(index: int, step: int) -> mx.nd.NDArray:
    gradient = mine(SHAPE, salt=index + 5 * step)
    if _bad_key(step) == KEYS[index] and hvd.rank() == hvd.size() - 1:
        gradient[2, 3] = np.nan
    return gradient


def _expected(name: str, steps: list[list[int]]) -> list[list[np.ndarray]]:
    """The weights after each update with the sums of some steps' gradients, in one process."""
    updater = mx.optimizer.get_updater(mx.optimizer.create(name, **OPTIMIZERS[name]))
    weights = [mx.nd.array(everyone(SHAPE, index)[0]) for index in range(len(KEYS))]
    found = [[weight.asnumpy() for weight in weights]]
    for summed in steps:
        for index, weight in enumerate(weights):
            sums = [everyone(SHAPE, index + 5 * step).sum(axis=0) for step in summed]
            updater(KEYS[index], mx.nd.array(sum(sums)), weight)
        found.append([weight.asnumpy() for weight in weights])
    return found


def _store(name: str) -> hvd.kvstore.KVStore:
    kv = hvd.create()
    kv.set_optimizer(mx.optimizer.create(name, **OPTIMIZERS[name]))
    for index, key in enumerate(KEYS):
        kv.init(key, mine(SHAPE, salt=index))
    return kv


def check_a_step_is_skipped_as_a_whole() -> None:
    """Weights, states, counts of updates, and what was pulled before the NaN was met."""
    with _skipping("PERSEUS_ALLREDUCE_NANHECK"), settings.captured_stderr():
        for name in OPTIMIZERS:
            kv = _store(name)
            expected = _expected(name, [[step] for step in range(STEPS) if not _bad_key(step)])
            outs = [mx.nd.zeros(SHAPE) for _ in KEYS]
            done = 0
            for step in range(STEPS):
                for index, key in enumerate(KEYS):
                    given = _gradient(index, step)
                    if index == 1:
                        given = given.tostype("row_sparse")
                    if index == 2:
                        kv.pushpull(key, given, out=outs[index])
                    else:
                        kv.push(key, given)
                        kv.pull(key, outs[index])
                done += not _bad_key(step)
                for out, right in zip(outs, expected[done], strict=True):
                    assert np.array_equal(out.asnumpy(), right), (name, step)
            assert kv._updater.optimizer.num_update == done == STEPS - 2


def check_sums_over_steps_are_skipped_as_a_whole() -> None:
    with _skipping(PERSEUS_ACCUMULATE_N_STEPS=2), settings.captured_stderr():
        kv, outs = _store("adam"), [mx.nd.zeros(SHAPE) for _ in KEYS]
        for step in range(STEPS):
            gradients = [_gradient(index, step) for index in range(len(KEYS))]
            kv.pushpull(KEYS, gradients, out=outs)
        # With the steps that have one go those they are summed up with.
        for out, right in zip(outs, _expected("adam", [[2, 3]])[-1], strict=True):
            assert np.array_equal(out.asnumpy(), right)


def check_rows_that_were_pulled() -> None:
    with _skipping(), settings.captured_stderr():
        kv = _store("sgd")
        chosen = mx.nd.array([1, 4], dtype="int64")
        out = mx.nd.sparse.zeros("row_sparse", SHAPE)
        kv.push("a", _gradient(0, 1))
        kv.row_sparse_pull("a", out, row_ids=chosen)
        assert not np.array_equal(out.data.asnumpy(), everyone(SHAPE)[0][[1, 4]])
        kv.push("c", _gradient(2, 1))
        assert_equal(out.data, everyone(SHAPE)[0][[1, 4]])


def check_a_trainers_step_is_skipped_as_a_whole() -> None:
    """As with DistributedTrainer, which is told all gradients at once."""
    results = []
    with _skipping(), settings.captured_stderr():
        for make in (
            lambda parameters: gluon.Trainer(
                parameters, "adam", {"learning_rate": 0.1}, kvstore="dist_sync_perseus"
            ),
            lambda parameters: hvd.DistributedTrainer(parameters, "adam", {"learning_rate": 0.1}),
        ):
            parameters = [gluon.Parameter(key, shape=SHAPE) for key in KEYS]
            for index, parameter in enumerate(parameters):
                parameter.initialize(mx.init.Constant(mx.nd.array(everyone(SHAPE, index)[0])))
            trainer = make(parameters)
            mean = 1 if isinstance(trainer, hvd.DistributedTrainer) else hvd.size()
            for step in range(STEPS):
                before = [parameter.data().asnumpy() for parameter in parameters]
                with autograd.record():
                    products = [p.data() * _gradient(i, step) for i, p in enumerate(parameters)]
                    loss = mx.nd.add_n(*(product.sum() for product in products))
                loss.backward()
                trainer.step(mean)
                after = [parameter.data().asnumpy() for parameter in parameters]
                unchanged = list(map(np.array_equal, before, after))
                assert all(unchanged) if _bad_key(step) else not any(unchanged), step
            results.append(after)
    for mine_, right in zip(*results, strict=True):
        assert np.array_equal(mine_, right)
    settings.assert_same_everywhere(results[0])
