"""A KVStore whose values are replaced, as folds of a cross-validation do: nothing old goes on."""

from __future__ import annotations

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_values import as_array, assert_equal, everyone, mine

import perseus.mxnet as hvd

SHAPE = (5, 7)


def _pulled(kv: mx.kvstore.KVStore, key, shape: tuple[int, ...] = SHAPE, dtype="float32"):
    out = mx.nd.full(shape, -1, dtype=dtype)
    kv.pull(key, out)
    return out


def _add(_, gradient, stored) -> None:
    stored += gradient


def check_sums_over_steps_begin_anew() -> None:
    """Those of all keys, so that they are complete at the same push."""
    with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        kv = hvd.create()
        kv._set_updater(_add)
        for fold in range(2):
            kv.init(["v", "w"], [mine(SHAPE), mine(SHAPE, salt=1)])
            for step in range(2 + (fold == 0)):  # the first fold ends within a sum
                kv.push(["v", "w"], [mine(SHAPE, salt=step), mine(SHAPE, salt=step)])
                added = sum(everyone(SHAPE, salt).sum(axis=0) for salt in range(2)) * (step > 0)
                for salt, key in enumerate(["v", "w"]):
                    assert_equal(_pulled(kv, key), everyone(SHAPE, salt)[0] + added)


def _holding_back(steps: int) -> tuple[mx.kvstore.KVStore, list]:
    """Return a store with residuals of keys 0 and 1, and the zeros that it began with.

    steps: of a sum; above 1, one is under way.
    """
    kv = hvd.create()
    kv.set_gradient_compression({"type": "topk", "ratio": 0.1})
    kv._set_updater(_add)
    zeros = [mx.nd.zeros(shape) for shape in settings.SHAPES[:2]]
    kv.init([0, 1], zeros)
    for step in range(2 * steps - 1):
        kv.push([0, 1], list(map(mx.nd.array, settings.normal(hvd.rank(), step))))
    kv._wait()
    return kv, zeros


def check_residuals_of_the_key_alone_are_dropped() -> None:
    for steps in (1, 2):
        with settings.apart(PERSEUS_ACCUMULATE_N_STEPS=steps):
            kv, zeros = _holding_back(steps)
            before = kv._reducer.residuals.read()
            kv.init(0, zeros[0])
            for _ in range(steps):
                kv.push([0, 1], zeros)
            assert not _pulled(kv, 0, zeros[0].shape).asnumpy().any()
            assert any(before["1"][1])
            kv.init(1, zeros[1])
            kv.set_optimizer(mx.optimizer.create("sgd"))
            after = kv._reducer.residuals.read()
            assert not any(after["0"][1])


def check_residuals_of_other_keys_stay() -> None:
    for steps in (1, 2):
        with settings.apart(PERSEUS_ACCUMULATE_N_STEPS=steps):
            kv, zeros = _holding_back(steps)
            before = kv._reducer.residuals.read()
            kv.init(0, zeros[0])
            assert any(before["1"][1])
            assert kv._reducer.residuals.read()["1"] == before["1"]


def check_steps_and_sums_end_with_their_world() -> None:
    nan = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    for variables, steps in ((nan, 1), ({"PERSEUS_ACCUMULATE_N_STEPS": 2}, 2)):
        with settings.world_with(**variables):
            kv = hvd.create()
            kv._set_updater(_add)
            kv.init(["v", "w"], [mine(SHAPE), mine(SHAPE, salt=1)])
            kv.push("v", mx.nd.full(SHAPE, np.nan))  # skipped, or held
        with settings.world_with(**variables):
            for step in range(steps):
                kv.push("w", mine(SHAPE, salt=step))
                kv.init("v", mine(SHAPE))
            added = sum(everyone(SHAPE, salt).sum(axis=0) for salt in range(steps))
            assert_equal(_pulled(kv, "w"), everyone(SHAPE, 1)[0] + added)


def check_a_float32_copy_becomes_the_new_value() -> None:
    kv = hvd.create()
    kv.set_optimizer(
        mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.5, wd=0.0, multi_precision=True)
    )
    zeros = as_array(np.zeros(SHAPE), "float16")
    kv.init("w", zeros)
    kv.push("w", mine(SHAPE, "float16"))
    velocity = -0.5 * everyone(SHAPE).sum(axis=0)
    assert_equal(_pulled(kv, "w", dtype="float16"), velocity)
    kv.init("w", mine(SHAPE, "float16", salt=1))
    kv.push("w", zeros)
    expected = everyone(SHAPE, salt=1)[0] + 0.5 * velocity  # momentum goes on
    assert_equal(_pulled(kv, "w", dtype="float16"), expected.astype(np.float16))
    kv.init("w", mine((3,), salt=2))  # a momentum of another shape does not fit
    kv.push("w", mine((3,)))
    expected = everyone((3,), salt=2)[0] - 0.5 * everyone((3,)).sum(axis=0)
    assert_equal(_pulled(kv, "w", (3,)), expected)


def check_sums_in_place_end_first() -> None:
    kv = hvd.create()
    shape = (1 << 20,)
    arrays = [mine(shape, salt=salt) for salt in range(3)]
    for array in arrays:
        kv.init("g", array)
        kv.pushpull("g", array)
    for salt, array in enumerate(arrays):
        assert_equal(array, everyone(shape, salt).sum(axis=0))


def check_stores_meet_where_ranks_have_made_different_numbers_of_them() -> None:
    """As where an elastic job has replaced a rank: others have stores of the worlds before."""
    kept = [hvd.create() for _ in range(hvd.rank() + 1)]
    for order in ((0, 1), (1, 0)):
        with settings.world_with(HOROVOD_STALL_CHECK_TIME_SECONDS=2):
            stores = [hvd.create(), kept[0]]  # those of the worlds before go on
            for kv in (stores[place] for place in order):
                kv.init("w", mine(SHAPE))
                kv.push("w", mine(SHAPE))
                assert_equal(_pulled(kv, "w"), everyone(SHAPE).sum(axis=0))
