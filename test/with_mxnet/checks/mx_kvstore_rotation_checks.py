"""rotate with a KVStore that a script of one's own pushes to, key by key."""

from __future__ import annotations

import os
import tempfile

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_replicas import RATE, SHAPES, Simulation, assert_same_bits, equal_everywhere, slope
from mx_values import everyone, mine, raised, usable

import perseus.mxnet as hvd

KEYS = list(SHAPES)
ROTATE = {"type": "rotate", "n": 2}


def _store(**options: object) -> hvd.kvstore.KVStore:
    kv = hvd.create()
    kv.set_gradient_compression(ROTATE)
    if options:
        kv.set_optimizer(mx.optimizer.create("sgd", rescale_grad=1 / hvd.size(), **options))
    return kv


def _push(kv: hvd.kvstore.KVStore, step: int) -> None:
    """Ranks pair keys by name: each pushes them in an order of its own."""
    for name in KEYS if hvd.rank() == 0 else KEYS[::-1]:
        kv.push(name, mx.nd.array(slope(name, hvd.rank(), step)))


def _pulled(kv: hvd.kvstore.KVStore) -> list[np.ndarray]:
    outs = [mx.nd.zeros(shape) for shape in SHAPES.values()]
    kv.pull(KEYS, outs)
    return [out.asnumpy() for out in outs]


def check_stored_weights_take_turns() -> None:
    with settings.apart():
        kv, simulation = _store(learning_rate=RATE), Simulation(2)
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        for step in range(7):
            _push(kv, step)
            simulation.step()
            assert_same_bits(_pulled(kv), simulation.mine(), step)
        hvd.synchronize_parameters()
        assert_same_bits(_pulled(kv), simulation.corrected_mean())
        assert equal_everywhere(_pulled(kv))


def check_an_updater_of_ones_own() -> None:
    with settings.apart():
        kv, simulation = _store(), Simulation(2)

        def update(key: str, gradient: mx.nd.NDArray, weight: mx.nd.NDArray) -> None:
            weight[:] -= gradient * RATE / hvd.size()

        kv._set_updater(update)
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        for step in range(5):
            _push(kv, step)
            simulation.step()
            assert_same_bits(_pulled(kv), simulation.mine(), step)


def check_a_step_without_all_keys_takes_its_turn_later() -> None:
    """Which is before the next step, since only that tells that the keys do not come any more."""
    with settings.apart():
        kv, simulation = _store(learning_rate=RATE), _Without(2)
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        for step in range(9):
            for name in KEYS if hvd.rank() == 0 else KEYS[::-1]:
                if (name, step) not in _Without.missing:
                    kv.push(name, mx.nd.array(slope(name, hvd.rank(), step)))
            simulation.step()
            if step not in (3, 6):
                assert_same_bits(_pulled(kv), simulation.mine(), step)
        hvd.synchronize_parameters()
        assert_same_bits(_pulled(kv), simulation.corrected_mean())


class _Without(Simulation):
    missing = (("few", 3), ("few", 6))

    def gradient(self, name: str, rank: int) -> np.ndarray:
        return super().gradient(name, rank) * ((name, self.taken) not in self.missing)


def check_a_nan_in_rows_skips_the_turn_of_dense_weights() -> None:
    """The sparse gradient comes last, when all dense weights have been updated."""
    skip = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    with settings.apart(**skip), settings.captured_stderr():
        kv, simulation = _store(learning_rate=RATE), Simulation(2)
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        kv.init("rows", mx.nd.zeros((4, 3)))
        rows = np.arange(12, dtype=np.float32).reshape(4, 3) + hvd.rank()
        for step in range(7):
            before = _pulled(kv)
            for name in KEYS:  # in one order: each push waits for its outcome
                kv.push(name, mx.nd.array(slope(name, hvd.rank(), simulation.taken)))
            bad = np.where(rows == 7, np.nan, rows) if step == 3 else rows
            kv.push("rows", mx.nd.array(bad).tostype("row_sparse"))
            if step == 3:
                assert_same_bits(_pulled(kv), before)
                continue
            simulation.step()
            assert_same_bits(_pulled(kv), simulation.mine(), step)


def check_parameters_that_were_pulled_are_corrected_at_once() -> None:
    """Those that broadcast was given, if they have the stored value, and no other array."""
    with settings.apart():
        kv, simulation = _store(learning_rate=RATE), Simulation(2)
        weights = {name: mx.nd.zeros(shape) for name, shape in SHAPES.items()}
        weights["w"] = weights["w"].as_np_ndarray()
        for name, array in weights.items():
            kv.broadcast(name, array, out=array)
        other = mx.nd.zeros(SHAPES["w"])
        for step in range(7):
            before = {name: array.asnumpy() for name, array in weights.items()}
            for name in KEYS:
                given = mx.nd.array(slope(name, hvd.rank(), step))
                if step == 5 and name == "few":
                    kv.push(name, given)
                else:
                    kv.pushpull(name, given, out=[weights[name], other][: 1 + (name == "w")])
            simulation.step()
            expected = dict(zip(KEYS, simulation.mine(), strict=True))
            if step == 5:
                expected["few"] = before["few"]
            assert_same_bits([a.asnumpy() for a in weights.values()], [*expected.values()], step)
            own = before["w"] - RATE * slope("w", hvd.rank(), step)
            assert_same_bits([other.asnumpy()], [own], step)
        assert not np.array_equal(own, expected["w"])


def check_weights_that_others_update_take_turns_on_all_devices() -> None:
    with settings.apart():
        kv, simulation = _store(), Simulation(2, "pushpull")
        weights = {name: [mx.nd.zeros(shape)] for name, shape in SHAPES.items()}
        for name, arrays in weights.items():
            arrays.append(mx.nd.zeros(SHAPES[name]))
            kv.broadcast(name, arrays[0], out=arrays)
        for step in range(7):
            sums = {}
            for name in KEYS:
                half = mx.nd.array(slope(name, hvd.rank(), step)) / 2  # of two devices
                sums[name] = [half, half.copy()]
                kv.pushpull(name, sums[name])
            for name, arrays in weights.items():
                for array, total in zip(arrays, sums[name], strict=True):
                    array[:] = array - total * RATE / hvd.size()
            simulation.step()
            for device in range(2):
                found = [arrays[device].asnumpy() for arrays in weights.values()]
                assert_same_bits(found, simulation.mine(), (step, device))
        hvd.synchronize_parameters()
        for device in range(2):
            found = [arrays[device].asnumpy() for arrays in weights.values()]
            assert_same_bits(found, simulation.corrected_mean())


def check_a_weight_that_the_store_does_not_know_is_refused() -> None:
    with settings.apart():
        kv = _store()
        gradient = mine((4, 3))
        kv.init("w", gradient)
        for push in (lambda: kv.push("w", gradient), lambda: kv.pushpull("w", gradient)):
            text = raised(ValueError, push)
            assert "set_optimizer" in text and "broadcast(key, value, out=weight)" in text, text
            assert "update_on_kvstore=True" in text and "param_only=True" in text, text
        half = mx.nd.zeros((4, 3), dtype="float16")
        kv.broadcast("half", half, out=half)
        text = raised(ValueError, lambda: kv.push("half", half))
        assert "keeps float16 weights in float32" in text and "set_optimizer" in text, text
        # What is no gradient, and what is sparse, travels whole.
        kv.init("value", gradient, param_only=True)
        kv.push("value", gradient)
        kv.init("rows", mx.nd.zeros((4, 3)))
        kv.push("rows", gradient.tostype("row_sparse"))
        kv.push("w", gradient, op=hvd.PerseusOp.Max)
        whole = mx.nd.array(np.arange(3) + hvd.rank(), dtype="int32")
        kv.init("whole", whole)
        kv.push("whole", whole)
        for key, expected in (
            ("value", everyone((4, 3)).sum(axis=0)),
            ("rows", everyone((4, 3)).sum(axis=0)),
            ("w", everyone((4, 3)).max(axis=0)),
        ):
            out = mx.nd.zeros((4, 3))
            kv.pull(key, out, ignore_sparse=False)
            assert np.array_equal(out.asnumpy(), expected), key
        out = mx.nd.zeros((3,), dtype="int32")
        kv.pull("whole", out)
        assert out.asnumpy().tolist() == [
            sum(i + rank for rank in range(hvd.size())) for i in range(3)
        ]
    usable()


def check_module_that_updates_weights_itself_is_refused() -> None:
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    try:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            text = raised(ValueError, _fitted)
            assert "no MXNET_UPDATE_ON_KVSTORE=0" in text, text
    finally:
        del os.environ["MXNET_UPDATE_ON_KVSTORE"]


def check_modules_weights_are_made_equal() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        module = _fitted()
        assert not equal_everywhere(_weights(module))
        hvd.synchronize_parameters()
        assert equal_everywhere(_weights(module))


def _fitted() -> mx.mod.Module:
    """A linear module that has seen this rank's rows."""
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) / 24 + hvd.rank()
    output = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="layer")
    module = mx.mod.Module(
        mx.sym.LinearRegressionOutput(output, mx.sym.Variable("label"), name="out"),
        data_names=["data"], label_names=["label"],
    )  # fmt: skip
    batches = mx.io.NDArrayIter({"data": rows}, {"label": rows[:, :1].repeat(4, axis=1)}, 4)
    module.fit(batches, kvstore="dist_sync_perseus", num_epoch=2, initializer=mx.init.One())
    return module


def _weights(module: mx.mod.Module) -> list[np.ndarray]:
    """Those that the next forward pass would use."""
    return [arrays[0].asnumpy() for arrays in module._exec_group.param_arrays]


def check_keys_may_come_later_and_values_again() -> None:
    with settings.apart():
        kv = _store(learning_rate=RATE)
        kv.init("w", mx.nd.zeros(SHAPES["w"]))
        for step in range(3):
            kv.push("w", mx.nd.array(slope("w", hvd.rank(), step)))
        kv.init(["few", "b"], [mx.nd.zeros(SHAPES[name]) for name in ("few", "b")])
        for step in range(3, 6):
            for name in KEYS:  # in one order: a new key marks no step's end
                kv.push(name, mx.nd.array(slope(name, hvd.rank(), step)))
        kv.init("few", mx.nd.full((3,), 5.0))  # of another shape
        kv.push("few", mx.nd.zeros((3,)))
        kv.set_gradient_compression({"type": "none"})
        kv.push(["w", "b"], [mx.nd.zeros(SHAPES[name]) for name in ("w", "b")])
        out = mx.nd.zeros((3,))
        kv.pull("few", out)
        assert out.asnumpy().tolist() == [5.0] * 3
        kv.set_gradient_compression(ROTATE)
        kv.push("w", mx.nd.zeros(SHAPES["w"]))
        kv.push("w", mx.nd.zeros(SHAPES["w"]))
        hvd.synchronize_parameters()
        value = mx.nd.zeros(SHAPES["w"])
        kv.pull("w", value)
        total = [slope("w", rank, step) for rank in range(hvd.size()) for step in range(6)]
        expected = -RATE * np.sum(total, axis=0) / hvd.size()
        assert np.abs(value.asnumpy() - expected).max() < 1e-6
        assert equal_everywhere([value.asnumpy()])


def check_loaded_states_leave_nothing_to_correct() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        kv, before = _store(learning_rate=RATE), []
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        for step in range(3):
            _push(kv, step)
        kv.save_optimizer_states(f"{folder}/states")
        kv.load_optimizer_states(f"{folder}/states")
        before = _pulled(kv)
        _push(kv, 3)
        own = [
            old - RATE * slope(name, hvd.rank(), 3) for name, old in zip(KEYS, before, strict=True)
        ]
        assert_same_bits(_pulled(kv), own)


def check_a_dropped_store_is_forgotten() -> None:
    with settings.apart():
        kv = _store(learning_rate=RATE)
        kv.init(KEYS, [mx.nd.zeros(shape) for shape in SHAPES.values()])
        for step in range(3):
            _push(kv, step)
        if hvd.rank() == 0:
            del kv
        hvd.synchronize_parameters()
    usable()
