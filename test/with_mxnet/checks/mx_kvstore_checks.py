"""The KVStore by hand: what is initialised, pushed and pulled, in all the forms it may have."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_values import as_array, assert_equal, everyone, mine, raised

import perseus.mxnet as hvd
from perseus.mxnet import PerseusOp

SHAPE = (5, 7)


def _store() -> mx.kvstore.KVStore:
    return hvd.create("dist_sync_perseus")


def _pulled(kv: mx.kvstore.KVStore, key, shape: tuple[int, ...] = SHAPE, dtype="float32"):
    out = mx.nd.full(shape, -1, dtype=dtype)
    kv.pull(key, out)
    return out


def check_it_joins_the_world_by_itself() -> None:
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    kv = mx.kvstore.create("dist_sync_perseus")
    assert (kv.rank, kv.num_workers, kv.local_rank) == (rank, size, rank)
    assert kv.is_capable("optimizer")
    assert "[kvstore] unknown" in raised(ValueError, lambda: kv.is_capable("flight"))
    for make in (mx.kv.create, mx.kvstore.create, hvd.create):
        for name in ("dist_sync_perseus", "dist-sync-perseus", "Dist_Sync_Perseus"):
            other = make(name)
            assert other.type == "dist_sync_perseus"
            assert isinstance(other, mx.kvstore.KVStore)
    assert hvd.create().type == "dist_sync_perseus"
    for name in ("dist_sync", "perseus", 3):
        text = raised(ValueError, lambda name=name: hvd.create(name))
        assert repr(name) in text
        assert "dist-sync-perseus" in text
    kv.barrier()
    kv._barrier()


def check_all_begin_with_what_rank_0_has() -> None:
    kv = _store()
    given = mine(SHAPE)
    kv.init("weight", given)
    assert_equal(_pulled(kv, "weight"), everyone(SHAPE)[0])
    assert_equal(given, everyone(SHAPE)[hvd.rank()])
    kv.init("weight", mine((3,), "float64", salt=1))  # anew, as something else
    assert_equal(_pulled(kv, "weight", (3,), "float64"), everyone((3,), salt=1)[0])
    outs = [mx.nd.zeros(SHAPE) for _ in range(2)]
    kv.broadcast("other", mine(SHAPE, salt=2), outs)
    for out in outs:
        assert_equal(out, everyone(SHAPE, salt=2)[0])


def check_a_value_that_is_no_parameter_is_an_allreduce_in_place() -> None:
    """Sum, Max and Min, never averaged, never compressed."""
    kv = _store()
    kv._set_updater(lambda *_: raised(AssertionError, lambda: None))
    with settings.apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        scores = everyone(SHAPE) / 3
        for op, combined in (
            (PerseusOp.Sum, scores.astype(np.float32).sum(axis=0)),
            (PerseusOp.Max, scores.astype(np.float32).max(axis=0)),
            (PerseusOp.Min, scores.astype(np.float32).min(axis=0)),
            (hvd.Sum, scores.astype(np.float32).sum(axis=0)),
        ):
            x = as_array(scores[hvd.rank()])
            with mx.autograd.record():
                kv.init("scores", x, param_only=1)
                kv.push("scores", x, op=op)
                kv.pull("scores", x)
            assert_equal(x, combined)
        x = as_array(scores[hvd.rank()])
        kv.push("scores", x, PerseusOp.Min)
        assert_equal(_pulled(kv, "scores"), scores.astype(np.float32).min(axis=0))
        again = as_array(scores[hvd.rank()])
        kv.pushpull("scores", again)
        assert_equal(again, scores.astype(np.float32).sum(axis=0))


def check_keys_values_and_devices_in_lists() -> None:
    kv, total = _store(), everyone(SHAPE).sum(axis=0)
    kv.init([3, 5], [mine(SHAPE), mine((2,), "int32")])
    kv.push([3, 5], [mine(SHAPE), mine((2,), "int32")])
    outs = [[mx.nd.zeros(SHAPE), mx.nd.zeros(SHAPE, mx.cpu(1))], mx.nd.zeros((2,), dtype="int32")]
    kv.pull([3, 5], outs)
    for out in outs[0]:
        assert_equal(out, total)
    assert_equal(outs[1], everyone((2,)).sum(axis=0))
    # Every device has its own: they are combined first.
    devices = [mine(SHAPE, salt=salt).as_in_context(mx.cpu(salt)) for salt in range(3)]
    every = np.stack([everyone(SHAPE, salt) for salt in range(3)])
    for op, combined in (
        (PerseusOp.Sum, every.sum(axis=(0, 1))),
        (PerseusOp.Max, every.max(axis=(0, 1))),
        (PerseusOp.Min, every.min(axis=(0, 1))),
    ):
        kv.push(3, devices, op=op)
        assert_equal(_pulled(kv, 3), combined)
    kv.pushpull(3, devices)
    for out in devices:
        assert_equal(out, every.sum(axis=(0, 1)))
    # The same key twice is two devices of one.
    kv.push([5, 5], [mine((2,), "int32"), mine((2,), "int32", salt=1)])
    both = everyone((2,)).sum(axis=0) + everyone((2,), salt=1).sum(axis=0)
    assert_equal(_pulled(kv, 5, (2,), "int32"), both)


def check_arrays_of_mxnets_numpy() -> None:
    kv = _store()
    with mx.util.np_shape(True), mx.util.np_array(True):
        x = mx.np.array(everyone(())[hvd.rank()], dtype="float32")
        kv.init("scalar", x)
        kv.pushpull("scalar", x)
        assert type(x) is mx.np.ndarray
        assert_equal(x, everyone(()).sum(axis=0))
        # Their devices, and outputs of others, or of MXNet's older kind.
        devices = [mine(SHAPE, salt=salt).as_np_ndarray() for salt in range(2)]
        kv.init("devices", mine(SHAPE))
        kv.push("devices", devices)
        total = (everyone(SHAPE) + everyone(SHAPE, 1)).sum(axis=0)
        for out in (mx.np.zeros(SHAPE, dtype="float32"), mx.nd.zeros(SHAPE)):
            kv.pull("devices", out)
            assert_equal(out, total)


def check_a_numpy_array_is_known_again() -> None:
    """By the two guards that compare arrays, and by sums that begin before the last one's end."""
    kv = _store()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    with mx.util.np_shape(True), mx.util.np_array(True):
        first, second = (mx.np.full((3,), value, dtype="float32") for value in (0, 7))
        kv.broadcast(0, first, out=first)
        kv.broadcast(0, second, out=second)
        gradient = mx.np.ones((3,), dtype="float32")
        message = raised(ValueError, lambda: kv.pushpull(0, gradient, out=first))
        assert "two trainers share this store" in message
        kv.pushpull(0, gradient, out=second)
        assert_equal(second, np.full(3, 7 - hvd.size()))
        assert kv._values[0].up_to_date[0] is second
        kv = _store()
        kv.init(0, first)
        kv.pushpull(0, gradient)
        assert kv._values[0].reduced is gradient


def check_pushes_in_any_order() -> None:
    """Ranks may push in orders of their own, with priorities; each finds its partner by its key."""
    kv, keys = _store(), [str(index) for index in range(20)]
    for index, key in enumerate(keys):
        kv.init(key, mine(SHAPE, salt=index))
    mixed = keys if hvd.rank() == 0 else keys[::-1]
    for step in range(3):
        for key in mixed:
            kv.push(key, mine(SHAPE, salt=int(key) + step), priority=-int(key))
    for index, key in enumerate(keys):
        assert_equal(_pulled(kv, key), everyone(SHAPE, salt=index + 2).sum(axis=0))


def check_an_updater_gets_the_sum() -> None:
    kv, seen = _store(), []

    def update(key, gradient, stored):
        seen.append(key)
        stored += 2 * gradient

    kv.init([1, 2], [mine(SHAPE), mine(SHAPE, salt=1)])
    kv._set_updater(update)
    gradient = mine(SHAPE, salt=2)
    kv.push([1, 2], [gradient, mine(SHAPE, salt=3)])
    kv.push(1, gradient)
    assert seen == [1, 2, 1]
    total = everyone(SHAPE, salt=2).sum(axis=0)
    assert_equal(_pulled(kv, 1), everyone(SHAPE)[0] + 4 * total)
    assert_equal(gradient, everyone(SHAPE, salt=2)[hvd.rank()])
    weight = mine(SHAPE)
    kv.pushpull(1, gradient, out=weight)
    assert_equal(weight, everyone(SHAPE)[0] + 6 * total)


def _optimizer(**more) -> mx.optimizer.Optimizer:
    return mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.5, wd=0.0, **more)


def check_an_optimizer_in_the_store_and_its_states() -> None:
    """As one process that is given the sums; what is saved is gone on with, bit for bit."""
    local, kv = mx.kvstore.create("local"), _store()
    for store in (local, kv):
        store.set_optimizer(_optimizer(rescale_grad=0.25))
    local.init("w", as_array(everyone(SHAPE)[0]))
    kv.init("w", mine(SHAPE))

    def step(number: int) -> None:
        local.push("w", as_array(everyone(SHAPE, number).sum(axis=0)))
        kv.push("w", mine(SHAPE, salt=number))
        assert_equal(_pulled(kv, "w"), _pulled(local, "w").asnumpy())

    step(1)
    step(2)
    with tempfile.TemporaryDirectory() as folder:
        for whole in (False, True):
            path = f"{folder}/states"
            kv.save_optimizer_states(path, dump_optimizer=whole)
            assert [entry.name for entry in Path(folder).iterdir()] == ["states"]
            other = _store()
            other.set_optimizer(_optimizer(rescale_grad=0.25))
            other.init("w", _pulled(kv, "w"))
            other.load_optimizer_states(path)
            kv = other
            step(3 + whole)
    plain = _store()
    for method in (plain.save_optimizer_states, plain.load_optimizer_states):
        assert "call set_optimizer" in raised(ValueError, lambda method=method: method("unused"))


def check_half_precision_weights_with_a_copy_in_full() -> None:
    kv = _store()
    kv.set_optimizer(_optimizer(multi_precision=True))
    kv.init("w", mine(SHAPE, "float16"))
    fine = as_array(np.full(SHAPE, 2.0**-12), "float16")
    for _ in range(4):
        kv.push("w", fine)
    velocity, weight = 0.0, everyone(SHAPE)[0]
    for _ in range(4):
        velocity = 0.5 * velocity - 0.5 * 2.0**-12 * hvd.size()
        weight = weight + velocity
    assert_equal(_pulled(kv, "w", dtype="float16"), weight.astype(np.float16))


def check_a_sum_that_pushpull_makes_in_place() -> None:
    """The store has none to pull then, until there is one again."""
    kv, x = _store(), mine(SHAPE)
    kv.init("g", x)
    kv.pushpull("g", x)
    total = everyone(SHAPE).sum(axis=0)
    assert_equal(x, total)
    assert "use push(" in raised(ValueError, lambda: kv.pull("g", x))
    out = mx.nd.zeros(SHAPE)
    kv.pushpull("g", x, out=out)
    for array in (out, _pulled(kv, "g")):
        assert_equal(array, total * hvd.size())
    assert_equal(x, total)
    # A call that is refused changes nothing.
    raised(ValueError, lambda: kv.pushpull("g", x.tostype("csr")))
    with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        refused = _store()
        refused.init("g", x)
        raised(ValueError, lambda: refused.pushpull("g", x))
        assert_equal(_pulled(refused, "g"), x.asnumpy())
    kv.pushpull("g", x)
    raised(ValueError, lambda: kv.push("g", mine((3,))))
    assert "use push(" in raised(ValueError, lambda: kv.pull("g", x))
    x = mine(SHAPE)
    kv.push("g", x)
    kv._set_updater(lambda _, gradient, stored: stored.__iadd__(gradient))
    kv.pushpull("g", x)
    assert_equal(x, 2 * total)
    kv = _store()
    kv.init("g", x)
    arrays = [mine(SHAPE, salt=salt) for salt in range(5)]
    for array in arrays:  # of one key, so that each has to wait for the one before
        kv.pushpull("g", array)
    for salt, array in enumerate(arrays):
        assert_equal(array, everyone(SHAPE, salt).sum(axis=0))


def check_keys_that_share_arrays_get_the_values_of_before_pushpull() -> None:
    """As in MXNet, which pushes all keys before it pulls the first one; the last one's value stays.

    mx.cpu(1) is another device of this rank.
    """
    keys, starts = ["a", "b", "c"], [0.0, 100.0, 200.0]
    for devices in (1, 2):
        total = sum(everyone(SHAPE, device).sum(axis=0) for device in range(devices))
        for updates in (False, True):
            kv = _store()
            kv.init(keys, [mx.nd.full(SHAPE, start) for start in starts])
            if updates:
                kv._set_updater(lambda _, gradient, stored: stored.__iadd__(gradient))
            shared = [mine(SHAPE, salt=each).as_in_context(mx.cpu(each)) for each in range(devices)]
            own = [mine(SHAPE, salt=each).as_in_context(mx.cpu(each)) for each in range(devices)]
            kv.pushpull(keys, [shared, own, shared])
            assert [array.context for array in shared] == [mx.cpu(i) for i in range(devices)]
            stored = [start * updates + total for start in starts]
            for array in shared:
                assert_equal(array, stored[2])
            for array in own:
                assert_equal(array, stored[1])
            for key, value in zip(keys, stored, strict=True):
                assert_equal(_pulled(kv, key), value)
    # Distinct arrays are summed in place, also if there are several keys.
    kv = _store()
    kv.init(keys, [mine(SHAPE)] * 3)
    kv.pushpull(keys, [mine(SHAPE) for _ in keys])
    assert all(kv._values[key].is_given_out for key in keys)


def check_compression_of_gradients() -> None:
    assert "'2bit'" not in raised(
        ValueError, lambda: _store().set_gradient_compression({"type": "3bit"})
    )
    for wrong in ({}, {"type": "fp16", "ratio": 1}, {"type": "topk", "ratio": 2}):
        raised(ValueError, lambda wrong=wrong: _store().set_gradient_compression(wrong))

    def error(parameters) -> float:
        kv = _store()
        if parameters:
            kv.set_gradient_compression(parameters)
        large, exact = [], 0
        for step in range(4):
            pushed = settings.normal(hvd.rank(), step)[0]
            if step == 0:
                kv.init("g", as_array(pushed))
            kv.push("g", as_array(pushed))
            large.append(_pulled(kv, "g", settings.SHAPES[0]).asnumpy().astype(np.float64))
            exact = exact + sum(
                settings.normal(rank, step)[0].astype(np.float64) for rank in range(hvd.size())
            )
        settings.assert_same_everywhere(large)
        return float(np.abs(sum(large) - exact).max())

    with settings.apart():
        assert error({"type": "none"}) < 1e-5
        for half in (None, {"type": "settings"}, {"type": "fp16"}):
            assert 1e-5 < error(half) < 0.05, half
        assert 1e-3 < error({"type": "bf16"}) < 0.4
        for blocks in ({"type": "int8"}, {"type": "2bit"}, {"type": "2bit", "threshold": 0.1}):
            assert 1e-3 < error(blocks) < 0.3, blocks
        assert error({"type": "topk", "ratio": 0.01}) > 1.0


def check_another_encoding_sends_what_the_last_one_held_back() -> None:
    with settings.apart():
        kv = _store()
        kv.set_gradient_compression({"type": "topk", "ratio": 0.01})
        arrived, exact = 0, 0
        for step in range(4):
            if step == 3:
                kv.set_gradient_compression({"type": "none"})
            pushed = settings.normal(hvd.rank(), step)[0]
            if step == 0:
                kv.init("g", as_array(pushed))
            kv.push("g", as_array(pushed))
            arrived = arrived + _pulled(kv, "g", settings.SHAPES[0]).asnumpy().astype(np.float64)
            exact = exact + sum(settings.normal(rank, step)[0] for rank in range(hvd.size()))
        np.testing.assert_allclose(arrived, exact, atol=1e-4)


def check_gradients_over_several_steps() -> None:
    """PERSEUS_ACCUMULATE_N_STEPS: an update for every second push, with the sum of both."""
    with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        kv = _store()
        kv.init("w", mine(SHAPE))
        text = raised(ValueError, lambda: kv.push("w", mine(SHAPE)))
        assert "update_on_kvstore=True" in text
        kv._set_updater(lambda _, gradient, stored: stored.__iadd__(gradient))
        expected = everyone(SHAPE)[0]
        for step in range(4):
            kv.push("w", mine(SHAPE, salt=step))
            if step % 2:
                for salt in (step - 1, step):
                    expected = expected + everyone(SHAPE, salt).sum(axis=0)
            assert_equal(_pulled(kv, "w"), expected)


def check_a_nan_skips_the_update() -> None:
    with settings.world_with(
        PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="skip"
    ):
        kv = _store()
        kv.init("w", mine(SHAPE))
        kv._set_updater(lambda _, gradient, stored: stored.__iadd__(gradient))
        bad = mine(SHAPE)
        if hvd.rank() == hvd.size() - 1:
            bad[1, 2] = np.nan
        for gradient in (bad, bad.tostype("row_sparse")):
            kv.push("w", gradient)
            assert_equal(_pulled(kv, "w"), everyone(SHAPE)[0])
        kv.push("w", mine(SHAPE))
        assert_equal(_pulled(kv, "w"), everyone(SHAPE)[0] + everyone(SHAPE).sum(axis=0))


def check_what_is_wrong_is_said() -> None:
    kv = _store()
    kv.init("w", mine(SHAPE))
    x = mine(SHAPE)
    for call, words in (
        (lambda: kv.push("v", x), ("push of 'v'", "call init")),
        (lambda: kv.pull("v", x), ("pull of 'v'", "call init")),
        (lambda: kv.row_sparse_pull("v", x, row_ids=x), ("'v'", "call init")),
        (lambda: kv.row_sparse_pull("w", x, row_ids=x), ("'w'", "not row-sparse")),
        (lambda: kv.row_sparse_pull("w", x), ("row_ids",)),
        *(
            (
                lambda numbers=numbers: kv.row_sparse_pull(
                    "w", x.tostype("row_sparse"), row_ids=mx.nd.array(numbers, dtype="int64")
                ),
                (f"from {min(numbers)} to {max(numbers)}", f"rows 0 to {SHAPE[0] - 1}"),
            )
            for numbers in ([0, SHAPE[0]], [1, -1])
        ),
        (lambda: kv.row_sparse_pull(["w", "w"], [x, x], row_ids=x), ("row_ids, got NDArray",)),
        (lambda: kv.row_sparse_pull(["w"], [x], row_ids=[x, x]), ("1 keys", "row_ids, got 2")),
        (lambda: kv.push("w", mine((3,))), ("(3,)", "(5, 7)")),
        (lambda: kv.pull("w", mine((3,))), ("(3,)", "(5, 7)")),
        (lambda: kv.push("w", mine(SHAPE, "float64")), ("float64", "float32")),
        (lambda: kv.push("w", x, op=hvd.Average), ("op=0", "PerseusOp.Max")),
        (lambda: kv.push("w", x, op="max"), ("op='max'", "PerseusOp.Max")),
        (lambda: kv.init(7, x), ("7", "all ints or all strings")),
        (lambda: kv.init("u", [x, x]), ("'u'", "got 2")),
        (lambda: kv.init("u", x.tostype("csr")), ("'u'", "csr")),
        (lambda: kv.push(["w", "w"], [x]), ("2 keys", "values, got 1")),
        (lambda: kv.push(["w", "w"], x), ("2 keys", "values, got NDArray")),
        (lambda: kv.push("w", x.tostype("row_sparse"), op=hvd.Max), ("'w'", "summed")),
    ):
        text = raised(ValueError, call)
        assert text.startswith("[kvstore] "), text
        assert all(word in text for word in words), text
    for call in (lambda: kv.push(1.5, x), lambda: kv.push("w", [1, 2]), lambda: kv.pull("w")):
        assert raised(TypeError, call).startswith("[kvstore] ")
    kv.set_optimizer(_optimizer())
    assert "param_only" in raised(ValueError, lambda: kv.push("w", x, op=hvd.Max))
    raised(NotImplementedError, lambda: kv._send_command_to_servers(0, ""))


def check_ranks_that_disagree() -> None:
    """MXNetError on all of them at the next wait, and the job goes on."""
    kv = _store()
    kv.init("uneven", mine((hvd.rank() + 1,)))
    text = raised(mx.base.MXNetError, lambda: _pulled(kv, "uneven", (hvd.rank() + 1,)).asnumpy())
    assert "uneven" in text
    kv.init("even", mine(SHAPE))
    kv.push("even", mine(SHAPE))
    assert_equal(_pulled(kv, "even"), everyone(SHAPE).sum(axis=0))
