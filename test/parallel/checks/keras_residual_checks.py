"""What lossy codecs hold back of Keras's gradients is saved, restored and carried along."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import gradient_settings as settings
import h5py
import keras
import numpy as np
from keras_training import arrays_of, assert_same_everywhere, make_data, make_model
from worlds import next_world

import perseus.keras as hvd
from perseus.elastic.loop import reset
from perseus.gradients import scopes


def _compiled(compression, **options):
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, **options)
    model.compile(hvd.DistributedOptimizer(optimizer, compression=compression), "mse")
    return model


def _fit(model, *callbacks) -> list[np.ndarray]:
    """Four batches; the weights afterwards."""
    x, y = make_data(hvd.rank())
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))
    return arrays_of(model.weights)


def _held(model) -> dict[str, bytes]:
    held = model.optimizer.perseus_residuals.residuals()
    return {name: bytes(data) for name, (_, data) in held.items()}


def _assert_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(map(np.array_equal, actual, expected))


def check_a_saved_model_goes_on_with_what_it_held() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        for compression, options in (
            (hvd.Compression.topk(0.1), {}),
            (hvd.Compression.int8, {"gradient_accumulation_steps": 2}),
        ):
            path, weights = Path(folder) / "all.keras", Path(folder) / "all.weights.h5"
            scopes._taken.clear()  # names begin anew, as in another process
            model = _compiled(compression, **options)
            _fit(model)
            held = _held(model)
            assert len(held) == 4 and any(any(data) for data in held.values())
            model.save(path)
            model.save_weights(weights)
            expected = _fit(model)
            after = _held(model)
            assert after != held
            for file in (weights, path):  # the functions of fit have been traced by now
                model.load_weights(file)
                assert _held(model) == held
                _assert_bits(_fit(model), expected)
                assert _held(model) == after
            assert_same_everywhere(model.weights)
            if not options:
                scopes._taken.clear()
                again = hvd.load_model(path, compression=compression)
                assert _held(again) == held
                _assert_bits(_fit(again), expected)
                assert _held(again) == after


def check_a_process_set_may_go_and_come_back() -> None:
    """Its number is another one then; nobody looks for what it held under the old one."""
    held_somewhere = {"HOROVOD_DYNAMIC_PROCESS_SETS": 1, "PERSEUS_ALLREDUCE_NANCHECK": 1}
    with settings.apart(**held_somewhere):
        first, other = hvd.add_process_set([0]), hvd.ProcessSet([1])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=first, compression=hvd.Compression.topk(0.02)
        )
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]

        def step() -> None:
            gradients = map(keras.ops.convert_to_tensor, settings.whole(hvd.rank(), 0))
            optimizer.apply(list(gradients), variables)

        source = optimizer.perseus_residuals
        step()
        source.go_on_with(source.residuals())
        hvd.remove_process_set(first)
        assert source.residuals() == {}
        source.go_on_with({})
        hvd.add_process_set(other)
        hvd.add_process_set(first)
        assert first.process_set_id == 2
        step()
        source.residuals()
        hvd.remove_process_set(first)
        hvd.remove_process_set(other)


def check_files_of_others_and_files_for_others() -> None:
    """Only the rank that wrote a file takes what it held; plain Keras does not mind it."""
    with settings.apart(), tempfile.TemporaryDirectory() as mine:
        path = Path(settings.control.gather_lines(mine, "folder")[0]) / "root.keras"
        model = _compiled(hvd.Compression.topk(0.1))
        _fit(model)
        held = _held(model)
        if hvd.rank() == 0:
            model.save(path)
        settings.control.gather_lines("", "saved")
        model.load_weights(path)
        assert _held(model) == (held if hvd.rank() == 0 else {})
        plain = keras.models.load_model(path)
        for variable, right in zip(
            plain.optimizer.variables, model.optimizer.variables, strict=True
        ):
            _assert_bits(arrays_of([variable]), arrays_of([right]))
        own = Path(mine) / "plain.keras"
        plain.save(own)
        model.load_weights(own)
        assert not _held(model)
        settings.control.gather_lines("", "read")


def check_files_are_as_ever_where_nothing_is_held() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        model = _compiled(hvd.Compression.fp16)
        gradients = [keras.ops.ones(variable.shape) for variable in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)
        path = Path(folder) / "all.weights.h5"
        model.save_weights(path)
        with h5py.File(path) as file:
            assert list(file["optimizer"]) == ["vars"]


def check_what_comes_under_another_name_is_sent_at_once() -> None:
    """Another optimizer of the same process: nothing is lost, but who owns what has changed."""
    with settings.apart():
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
        total = [np.zeros(shape) for shape in settings.SHAPES]
        held: dict = {}
        for step in range(3):
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), compression=hvd.Compression.topk(0.02), op=hvd.Sum
            )
            optimizer.perseus_residuals.go_on_with(held)
            given = settings.whole(hvd.rank(), step)
            optimizer.apply([keras.ops.convert_to_tensor(array) for array in given], variables)
            held = optimizer.perseus_residuals.residuals()
            for rank in range(hvd.size()):
                total = [a + b for a, b in zip(total, settings.whole(rank, step), strict=True)]
            complete = [
                np.array_equal(-a, b) for a, b in zip(arrays_of(variables), total, strict=True)
            ]
            assert all(complete) == (step == 1), step


def check_survivors_go_on_with_what_they_hold() -> None:
    with settings.apart():
        model = _compiled(hvd.Compression.topk(0.1))
        _fit(model)
        held = _held(model)
        state = hvd.elastic.KerasState(model)
        expected = _fit(model)
        after = _held(model)
        assert after != held
        settings.basics.end_world()
        state.restore()
        reset()
        state.on_reset()
        state.sync()
        assert _held(model) == held
        _assert_bits(_fit(model), expected)
        assert _held(model) == after
        next_world()  # as when hosts have changed
        state.sync()
        assert _held(model) == after
        hvd.flush_residuals()
        x, y = make_data(hvd.rank())
        model.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert not _held(model)


def check_damaged_residuals_are_refused() -> None:
    saved = _compiled(hvd.Compression.int8).optimizer.perseus_residuals
    entries = [b"\xff", b"[]", b'{"rank": 0}', b'{"rank": 0, "held": [["a"]]}']
    entries += [b'{"rank": 0, "held": [["a", -1]]}', b'{"rank": 0, "held": [["not there", 1]]}']
    for entry in entries:
        try:
            saved.load_own_variables({"index": np.frombuffer(entry, np.uint8)})
        except ValueError as error:
            assert str(error) == "[residuals] this is not what Perseus has saved"
        else:
            raise AssertionError(f"{entry!r} was taken for residuals")
