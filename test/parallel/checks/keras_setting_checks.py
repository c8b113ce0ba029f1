"""The variables about gradients with Keras 3, on the framework that is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import gradient_settings as settings
import keras
import numpy as np
from keras_training import arrays_of, assert_close, assert_same_everywhere, make_data, make_model

import perseus.keras as hvd

STEPS = 4  # batches of an epoch


def _reduce(given: list[settings.Arrays]) -> list[settings.Arrays]:
    """SGD from zero, with a rate of one, shows what is applied."""
    variables = [keras.Variable(np.zeros(shape, "float32"), name="v") for shape in settings.SHAPES]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    results = []
    for arrays in given:
        optimizer.apply([keras.ops.convert_to_tensor(array) for array in arrays], variables)
        results.append([-array for array in arrays_of(variables)])
        for variable in variables:
            variable.assign(np.zeros(variable.shape, "float32"))
    return results


def check_dtype_and_scale() -> None:
    settings.dtype_and_scale(_reduce)


def check_int8() -> None:
    settings.int8(_reduce)


def check_top_k() -> None:
    settings.top_k(_reduce)


def check_powersgd() -> None:
    settings.powersgd(_reduce)


def check_fit_rotates_in_a_function() -> None:
    """The parameters of a compiled model are equal after a synchronisation, and only then."""
    with settings.apart():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        model = make_model()
        model.compile(
            hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.rotate(2)),
            "mse",
            jit_compile=False,
        )
        x, y = make_data(hvd.rank())
        model.fit(x, y, batch_size=len(x) // STEPS, epochs=2, shuffle=False, verbose=0)
        flat = np.concatenate([array.reshape(-1) for array in arrays_of(model.trainable_variables)])
        replicas = settings.control.gather_lines(flat.tobytes().hex(), "replicas")
        assert len(set(replicas)) == hvd.size()
        hvd.synchronize_parameters()
        assert_same_everywhere(model.trainable_variables)


def check_the_shape_of_the_allreduce_changes_nothing() -> None:
    settings.shape_of_the_allreduce(_reduce)


def _trained(optimizer, epochs: int = 1, data=None, callbacks=(), **options):
    model = make_model()
    model.compile(optimizer, "mse")
    x, y = make_data(hvd.rank()) if data is None else data
    model.fit(
        x, y, batch_size=len(x) // STEPS, epochs=epochs, shuffle=False, verbose=0,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    return model


def check_fit_sums_up_over_steps() -> None:
    """Two batches summed are one of twice the size, taken twice."""
    expected = make_model()
    expected.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    parts = [make_data(rank) for rank in range(hvd.size())]
    for _ in range(2):
        for half in (slice(0, 16), slice(16, 32)):
            joined = [np.concatenate([part[k][half] for part in parts]) for k in (0, 1)]
            expected.train_on_batch(*joined)
    with settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model = _trained(hvd.DistributedOptimizer(optimizer), epochs=2)
        assert_close(model.weights, expected.weights, 1e-4)
        assert_same_everywhere(model.weights)
        assert int(model.optimizer.iterations) == 2 * STEPS  # batches


def check_a_nan_in_fit() -> None:
    """Skipped or raised; it is in the second of four batches of the last rank."""
    x, y = (array.copy() for array in make_data(hvd.rank()))
    last = hvd.size() - 1
    if hvd.rank() == last:
        x[len(x) // STEPS] = np.nan
    steps = {}
    for action in ("skip", "raise"):
        with (
            settings.world_with(
                PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION=action
            ),
            settings.captured_stderr() as text,
        ):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            try:
                model = _trained(optimizer, data=(x, y))
            except Exception as error:
                assert action == "raise", error
                assert "NaN in the gradient of" in str(error)
                assert f"on rank {last}" in str(error)
                steps[action] = 1
                continue
            steps[action] = int(model.optimizer.iterations)
            lines = [line for line in text().splitlines() if "[nancheck]" in line]
            assert any(f"on rank {last}" in line for line in lines), text()
            assert any("this step is skipped" in line for line in lines), text()
            assert not any(np.isnan(weight).any() for weight in arrays_of(model.weights))
    assert steps == {"skip": STEPS - 1, "raise": 1}, steps


class _Slow(keras.callbacks.Callback):
    def __init__(self, text) -> None:
        super().__init__()
        self.rank = settings.SlowRank(text)

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.rank.before_step()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.rank.after_step()
        self.model.stop_training = self.rank.named


def check_a_slow_rank_is_named_in_fit() -> None:
    with (
        settings.world_with(PERSEUS_PERF_CHECK_N_STEPS=2),
        settings.captured_stderr() as text,
    ):
        slow = _Slow(text)
        _trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 100, callbacks=[slow])
        assert slow.rank.named


class _Silence(keras.callbacks.Callback):
    def on_train_begin(self, logs=None) -> None:
        self.silence = settings.Silence()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.silence.after_step()

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.epochs = epoch + 1
        self.silence.ask()
        self.model.stop_training = self.silence.reached


def check_fit_becomes_silent() -> None:
    """PERSEUS_OFFLINE_NEG: the same bits, and nothing is sent but data."""
    with settings.world_with(PERSEUS_OFFLINE_NEG=1):
        silent = _Silence()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model = _trained(optimizer, 30, callbacks=[silent])
        assert silent.silence.reached, silent.silence.sent
    loud = _Silence()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    other = _trained(optimizer, silent.epochs, callbacks=[loud])
    assert not loud.silence.reached, loud.silence.sent
    assert all(map(np.array_equal, arrays_of(model.weights), arrays_of(other.weights)))


def check_settings_do_not_touch_what_is_no_gradient() -> None:
    with settings.apart(
        PERSEUS_ALLREDUCE_DTYPE=0, PERSEUS_ACCUMULATE_N_STEPS=2, LIGHT_TOPK_ALLREDUCE=1
    ):
        value = np.float32(1 / 3)
        total = keras.ops.convert_to_numpy(hvd.allreduce(value, name="metric", op=hvd.Sum))
        np.testing.assert_allclose(total, hvd.size() / 3, rtol=1e-7)
