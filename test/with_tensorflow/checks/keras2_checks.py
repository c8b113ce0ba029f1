"""Keras 2, of TensorFlow 2.15 or as tf_keras: optimizers of both kinds, callbacks, saved models."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import tensorflow as tf
from tf_training import raised
from worlds import world_with

import perseus.tensorflow.horovod as hvd_tf
import perseus.tensorflow.horovod.keras as hvd
from perseus.keras.library import keras

ROWS, LOCAL, BATCHES = 20, 8, 4
KINDS = (keras.optimizers, keras.optimizers.legacy)


def _model(seed: int = 3):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.layers.Dense(5, "tanh", input_shape=(4,)), keras.layers.Dense(2)]
    )


def _data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    return tuple(random.normal(size=(LOCAL * BATCHES, n)).astype("float32") for n in (4, 2))


def _joined(data) -> list[np.ndarray]:
    """The ranks' batches, one behind the other."""
    parts = [data(rank) for rank in range(hvd_tf.size())]
    starts = range(0, LOCAL * BATCHES, LOCAL)
    return [
        np.concatenate([part[k][i : i + LOCAL] for i in starts for part in parts]) for k in (0, 1)
    ]


def _fit(model, data=None, epochs: int = 2, callbacks=(), size: int = LOCAL) -> None:
    x, y = _data(hvd_tf.rank()) if data is None else data
    model.fit(
        x, y, batch_size=size, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def _variables(optimizer) -> list:
    found = optimizer.variables
    return list(found() if callable(found) else found)


def _same_everywhere(variables) -> None:
    for index, variable in enumerate(variables):
        value = np.asarray(variable.numpy())
        root = hvd.broadcast(value, 0, name=f"same_{index}").numpy()
        assert np.array_equal(root, value), (index, root, value)


def _close(actual, expected) -> None:
    for mine, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


def check_fit_is_fit_with_the_joined_batch() -> None:
    for kind in KINDS:
        for make in (
            lambda kind=kind: kind.SGD(0.1, momentum=0.9, clipnorm=0.05),
            lambda kind=kind: kind.Adam(0.01),
        ):
            model, reference = _model(), _model()
            model.compile(hvd.DistributedOptimizer(make()), "mse")
            reference.compile(make(), "mse")
            assert type(model.optimizer).__module__ == type(reference.optimizer).__module__
            _fit(model)
            _fit(reference, _joined(_data), size=LOCAL * hvd_tf.size())
            _close(model.get_weights(), reference.get_weights())
            _same_everywhere([*model.weights, *_variables(model.optimizer)])


def check_the_options_of_the_reduction() -> None:
    for kind in KINDS:
        start = _model()
        for options, factor in (
            ({"op": hvd.Sum}, hvd_tf.size()),
            ({"gradient_predivide_factor": 2.0, "groups": 2}, 1.0),
            ({"groups": [[start.weights[0], start.weights[3]]]}, 1.0),
        ):
            start.set_weights(_model().get_weights())
            reference = _model()
            start.compile(
                hvd.DistributedOptimizer(kind.SGD(0.05), **options), "mse", run_eagerly=True
            )
            reference.compile(kind.SGD(0.05 * factor), "mse", run_eagerly=True)
            _fit(start, epochs=1)
            _fit(reference, _joined(_data), 1, size=LOCAL * hvd_tf.size())
            _close(start.get_weights(), reference.get_weights())


def _embedding():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [layers.Embedding(ROWS, 4, input_length=3), layers.Flatten(), layers.Dense(2)]
    )


def _words(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    # Some rows are every rank's, some only one's.
    words = random.integers(0, ROWS // 2, (LOCAL * BATCHES, 3)) + rank % 2
    return words.astype("int32"), random.normal(size=(LOCAL * BATCHES, 2)).astype("float32")


def check_sparse_gradients_are_those_of_the_joined_batch() -> None:
    for kind in KINDS:
        for dense in (False, True):
            model, reference = _embedding(), _embedding()
            model.compile(
                hvd.DistributedOptimizer(kind.Adam(0.01), sparse_as_dense=dense),
                "mse",
                run_eagerly=dense,
            )
            reference.compile(kind.Adam(0.01), "mse", run_eagerly=dense)
            _fit(model, _words(hvd_tf.rank()))
            _fit(reference, _joined(_words), size=LOCAL * hvd_tf.size())
            _close(model.get_weights(), reference.get_weights())
            _same_everywhere(model.weights)


def check_backward_passes_are_summed_up() -> None:
    for kind in KINDS:
        for average in (False, True):
            model, reference = _model(), _model()
            optimizer = hvd.DistributedOptimizer(
                kind.SGD(0.02, momentum=0.9),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )
            model.compile(optimizer, "mse", run_eagerly=average)
            reference.compile(
                kind.SGD(0.02 if average else 0.04, momentum=0.9), "mse", run_eagerly=average
            )
            x, y = _data(hvd_tf.rank())
            for first in (0, LOCAL, 2 * LOCAL):
                model.train_on_batch(x[first : first + LOCAL], y[first : first + LOCAL])
            # Two passes of each rank are one step.
            x, y = _joined(_data)
            both = 2 * LOCAL * hvd_tf.size()
            reference.train_on_batch(x[:both], y[:both])
            _close(model.get_weights(), reference.get_weights())
            assert int(optimizer.iterations) == 3
            assert int(optimizer._agg_helper.counter) == 1


def check_passes_of_other_variables_are_counted_apart() -> None:
    for kind in KINDS:
        a, b = tf.Variable([0.0, 0.0], name="a"), tf.Variable([0.0, 0.0], name="b")
        optimizer = hvd.DistributedOptimizer(kind.SGD(1.0), backward_passes_per_step=2)
        if kind is keras.optimizers:
            optimizer.build([a, b])
        for variables in ([b], [a, b], [a]):  # the first layer is unfrozen, then the last frozen
            for _ in range(2):
                optimizer.minimize(lambda a=a, b=b: tf.reduce_sum(a + 10 * b), variables)
        np.testing.assert_allclose(a, [-4.0] * 2)
        np.testing.assert_allclose(b, [-40.0] * 2)


def check_some_gradients_stay_on_their_rank() -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    for kind in KINDS:
        optimizer = hvd.DistributedOptimizer(kind.SGD(1.0))
        own, common = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
        optimizer.register_local_var(own)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own * (rank + 1.0)) + tf.reduce_sum(common * (rank + 1.0))
        optimizer.minimize(loss, [own, common], tape=tape)
        _close([own.numpy()], [np.array([1.0, 2.0]) - (rank + 1) / size])
        _close([common.numpy()], [np.array([3.0]) - (size + 1) / 2])
        optimizer = hvd.DistributedOptimizer(kind.SGD(1.0, global_clipnorm=0.5))
        optimizer.register_local_var(own)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own) + tf.reduce_sum(common)
        minimize = partial(optimizer.minimize, loss, [own, common], tape=tape)
        assert "use clipnorm or clipvalue" in raised(ValueError, minimize)


def check_gradients_of_the_core_may_not_be_applied() -> None:
    skip = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    for kind in KINDS:
        with world_with(**skip):
            model = _model()
            model.compile(hvd.DistributedOptimizer(kind.Adam(0.01)), "mse", run_eagerly=True)
            x, y = _data(hvd_tf.rank())
            if hvd_tf.rank() == 0:
                x[LOCAL + 1] = np.nan  # in the second of four batches
            _fit(model, (x, y), epochs=1)
            assert all(np.isfinite(w).all() for w in model.get_weights())
            assert int(model.optimizer.iterations) == BATCHES - 1
            _same_everywhere(model.weights)
        with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
            model, reference = _model(), _model()
            model.compile(hvd.DistributedOptimizer(kind.SGD(0.02)), "mse", run_eagerly=True)
            reference.compile(kind.SGD(0.04), "mse", run_eagerly=True)
            x, y = _data(hvd_tf.rank())
            for first in (0, LOCAL, 2 * LOCAL):
                model.train_on_batch(x[first : first + LOCAL], y[first : first + LOCAL])
            x, y = _joined(_data)
            both = 2 * LOCAL * hvd_tf.size()
            reference.train_on_batch(x[:both], y[:both])
            _close(model.get_weights(), reference.get_weights())
            assert int(model.optimizer.iterations) == 3


def check_mixed_precision_leaves_out_a_step_on_all_ranks() -> None:
    for kind in KINDS:
        for around in (False, True):
            keras.mixed_precision.set_global_policy("mixed_float16")
            try:
                model = _model()
                optimizer = kind.SGD(0.05, momentum=0.9)
                if around:
                    optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
                optimizer = hvd.DistributedOptimizer(optimizer)
                model.compile(optimizer, "mse", run_eagerly=around)
            finally:
                keras.mixed_precision.set_global_policy("float32")
            x, y = _data(hvd_tf.rank())
            if hvd_tf.rank() == hvd_tf.size() - 1:
                x[LOCAL + 1] = np.inf  # in the second of four batches
            _fit(model, (x, y), epochs=1)
            assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
            _same_everywhere([*model.weights, *_variables(model.optimizer)])
            assert all(np.isfinite(w).all() for w in model.get_weights())
            assert int(model.optimizer.iterations) == BATCHES  # Keras 2 counts what it leaves out
            assert float(model.optimizer.loss_scale) == 2.0**14


def check_loss_scaling_goes_on_after_a_rank_has_joined() -> None:
    """The last rank has one batch, the others have three."""
    rank, size = hvd_tf.rank(), hvd_tf.size()
    for kind in KINDS:
        variable = tf.Variable([0.0])
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            hvd.DistributedOptimizer(kind.SGD(1.0)), initial_scale=8.0, dynamic_growth_steps=100
        )
        for step in range(1 if rank == size - 1 else 3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * size)
            optimizer.minimize(loss, [variable], tape=tape)
            assert float(optimizer.loss_scale) == 8.0
            expected = -size - step * (size - 1)
            np.testing.assert_allclose(variable.numpy(), [expected], rtol=1e-6)
        hvd_tf.join()


class _Custom(keras.optimizers.RMSprop):
    """A class that Keras does not know."""


def check_saved_models_go_on() -> None:
    new, legacy = KINDS
    # What Keras 2 does not save, a legacy optimizer's state in .keras, cannot go on.
    for make, suffix in (
        (new.Adam, ".keras"), (new.Adam, ".h5"), (_Custom, ".keras"), (legacy.Adam, ".h5")
    ):  # fmt: skip
        model = _model()
        model.compile(hvd.DistributedOptimizer(make(0.01)), "mse", run_eagerly=True)
        _fit(model)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / f"model{suffix}")
            model.save(path)
            loaded = hvd.load_model(path, custom_optimizers=[_Custom])
            plain = keras.models.load_model(path, custom_objects={"_Custom": _Custom})
        assert not hasattr(plain.optimizer, "register_local_var")
        assert hasattr(loaded.optimizer, "register_local_var")
        assert type(loaded.optimizer).__name__ == make.__name__
        assert len(_variables(loaded.optimizer)) == len(_variables(model.optimizer)) > 4
        for trained in (model, loaded):
            _fit(trained, epochs=1)
        _close(loaded.get_weights(), model.get_weights())
        _close(
            [v.numpy() for v in _variables(loaded.optimizer)],
            [v.numpy() for v in _variables(model.optimizer)],
        )
        _same_everywhere(loaded.weights)


@keras.saving.register_keras_serializable("checks", "Other")
class Registered(keras.optimizers.RMSprop):
    """A class that Keras finds by the name under which the script has registered it."""


def check_registered_optimizers_are_saved_under_their_names() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".keras", ".h5"):
            saved, best = (str(Path(folder) / f"{name}{suffix}") for name in ("saved", "best"))
            model = _model()
            model.compile(hvd.DistributedOptimizer(Registered(0.01)), "mse", run_eagerly=True)
            _fit(model, callbacks=[keras.callbacks.ModelCheckpoint(best)])
            model.save(saved)
            for path in (saved, best):
                assert type(keras.models.load_model(path).optimizer) is Registered
                again = hvd.load_model(path)
                assert isinstance(again.optimizer, Registered)
                _fit(again, epochs=1)
                _same_everywhere(again.weights)
    assert keras.saving.get_registered_object("checks>Other") is Registered


class _Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot serialize."""

    def __call__(self, step):
        return 1.0 / (tf.cast(step, tf.float32) + 1.0)


def check_any_learning_rate_is_taken_over() -> None:
    rates = iter((0.5, 0.25))
    steps = {"schedule": (1.0, 0.5), "callable": (0.5, 0.25)}
    for kind in KINDS:
        for what, expected in steps.items():
            if what == "callable":
                if kind is keras.optimizers:
                    continue  # it makes a variable of what the callable returns at first
                given = kind.SGD(partial(next, rates))
            else:
                given = kind.SGD(_Rate())
            variable = tf.Variable(0.0)
            optimizer = hvd.DistributedOptimizer(given)
            for rate in expected:
                before = variable.numpy()
                with tf.GradientTape() as tape:
                    loss = variable * (hvd_tf.rank() + 1.0)
                optimizer.minimize(loss, [variable], tape=tape)
                mean = (hvd_tf.size() + 1) / 2
                np.testing.assert_allclose(before - variable.numpy(), rate * mean, rtol=1e-6)


def check_options_that_configs_lack_are_taken_over() -> None:
    def clip(pairs):
        return [(tf.clip_by_value(gradient, -1.0, 1.0), variable) for gradient, variable in pairs]

    weight = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.legacy.SGD(1.0, gradient_transformers=[clip])
    )
    optimizer.minimize(lambda: tf.reduce_sum(weight * 10.0), [weight])
    assert weight.numpy() == [-1.0]
    if hasattr(keras.optimizers.Adam(), "adaptive_epsilon"):  # not in TensorFlow 2.15
        plain = keras.optimizers.Adam(0.1, adaptive_epsilon=True)
        assert hvd.DistributedOptimizer(plain).adaptive_epsilon


def check_an_optimizer_that_has_begun_goes_on() -> None:
    for kind in KINDS:
        model = _model()
        model.compile(kind.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
        _fit(model, _joined(_data))
        begun = [v.numpy() for v in _variables(model.optimizer)]
        model.compile(hvd.DistributedOptimizer(model.optimizer), "mse", run_eagerly=True)
        x, _ = _data(0)
        model.train_on_batch(x * 0.0, model.predict(x * 0.0, verbose=0))  # the gradient is 0
        for before, after in zip(begun, _variables(model.optimizer), strict=True):
            if before.ndim:
                _close([after.numpy()], [before * 0.9])


def check_weights_and_state_are_the_roots_after_a_batch() -> None:
    for kind in KINDS:
        model = _model(seed=hvd_tf.rank())
        kept = model.weights[1]
        kept.assign(kept + hvd_tf.rank())
        model.compile(hvd.DistributedOptimizer(kind.Adam(0.01)), "mse", run_eagerly=True)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kept])
        _fit(model, callbacks=[broadcast])
        shared = [v for v in model.weights if v is not kept]
        _same_everywhere([*shared, *_variables(model.optimizer)])
        others = hvd.allgather(kept.numpy()[None], name="kept").numpy()
        assert not np.array_equal(others[0], others[-1])


def check_a_train_step_that_reduces_nothing_is_warned_of() -> None:
    def warned(how: str, kind, **options) -> bool:
        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner = _model()

            def call(self, x):
                return self.inner(x)

            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                if how == "tape":
                    tape = hvd_tf.DistributedGradientTape(tape)
                weights = self.trainable_weights
                if how == "minimize":
                    self.optimizer.minimize(loss, weights, tape=tape)
                else:
                    gradients = tape.gradient(loss, weights)
                    self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"loss": loss}

        model = Model()
        model.compile(hvd.DistributedOptimizer(kind.SGD(0.1), **options))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        return any("ended without a reduction" in str(entry.message) for entry in caught)

    for kind in KINDS:
        assert warned("apply_gradients", kind) == (hvd_tf.rank() == 0)
        assert not warned("minimize", kind)
        assert not warned("minimize", kind, backward_passes_per_step=3)
        assert not warned("tape", kind)
        with world_with(PERSEUS_ACCUMULATE_N_STEPS=3):
            assert not warned("minimize", kind)


def check_the_learning_rate_follows_and_momentum_is_corrected() -> None:
    for kind in KINDS:
        model = _model()
        model.compile(
            hvd.DistributedOptimizer(kind.SGD(0.3, momentum=0.5)), "mse", run_eagerly=True
        )
        rates, steps = [], []

        class Watch(keras.callbacks.Callback):
            def on_batch_begin(self, batch, logs=None, *, model=model, rates=rates, steps=steps):
                rates.append(float(model.optimizer.learning_rate))
                steps.append([v.numpy() for v in _variables(model.optimizer) if v.shape.rank])

        schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch)
        x, y = _data(hvd_tf.rank())
        _fit(model, (x, y), 2, [schedule, Watch()])
        _close(rates, [0.4] * BATCHES + [0.2] * BATCHES)
        model.optimizer.learning_rate = 0.8
        before = [v.numpy() for v in _variables(model.optimizer) if v.shape.rank]
        _fit(model, (x[:LOCAL], y[:LOCAL]), 1, [schedule, Watch()])
        assert len(before) == len(steps[-1]) == 4
        _close(steps[-1], [velocity * 0.5 for velocity in before])
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
        rates.clear()
        _fit(model, (x, y), 2, [warmup, Watch()])
        assert rates == sorted(rates)
        assert np.isclose(rates[-1], 0.4)
        assert 0.4 / hvd_tf.size() < rates[0] < 0.3


class _OfSeveral(hvd.callbacks.LearningRateScheduleCallback):
    """Scales the rates of several optimizers, and their momentum for one batch.

    initial_lr: of each. Like scripts for Horovod, it overrides its callback's methods, and reads
    and writes by Keras' backend.
    """

    def on_train_begin(self, logs=None) -> None:
        self.steps_per_epoch = self._autodetect_steps_per_epoch()

    def _adjust_learning_rate(self, epoch: float) -> None:
        read, write = self.backend.get_value, self.backend.set_value
        self.restore_momentum = [read(each.momentum) for each in self.model.optimizers]
        for each, initial in zip(self.model.optimizers, self.initial_lr, strict=True):
            before = read(each.lr)
            write(each.lr, initial * self.multiplier(epoch))
            write(each.momentum, read(each.momentum) * read(each.lr) / before)

    def _restore_momentum_if_needed(self) -> None:
        for each, momentum in zip(self.model.optimizers, self.restore_momentum, strict=True):
            self.backend.set_value(each.momentum, momentum)

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        logs["rates"] = [float(self.backend.get_value(each.lr)) for each in self.model.optimizers]


def check_a_subclass_overrides_horovods_methods() -> None:
    model, kind = _model(), keras.optimizers.legacy
    first, second = (hvd.DistributedOptimizer(kind.SGD(0.5, momentum=m)) for m in (0.25, 0.125))
    model.compile(first, "mse", run_eagerly=True)
    model.optimizers = [first, second]
    seen, logged = [], []

    class Watch(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(tuple(float(x) for o in (first, second) for x in (o.lr, o.momentum)))

        def on_batch_end(self, batch, logs=None):
            assert (float(first.momentum), float(second.momentum)) == (0.25, 0.125)

        def on_epoch_end(self, epoch, logs=None):
            logged.append(logs["rates"])

    own = _OfSeveral([0.5, 1.0], lambda epoch: 1 - epoch / 2, staircase=False)
    _fit(model, epochs=1, callbacks=[own, Watch()])
    assert own.steps_per_epoch == BATCHES
    factors = [1 - batch / 2 / BATCHES for batch in range(BATCHES)]
    changes = [1.0, *(new / old for old, new in pairwise(factors))]
    expected = [
        (0.5 * factor, 0.25 * change, factor, 0.125 * change)
        for factor, change in zip(factors, changes, strict=True)
    ]
    expected[0] = (0.5, 0.25, 1.0, 0.25)  # the second one's rate was doubled
    _close(seen, expected)
    _close(logged, [(0.5 * factors[-1], factors[-1])])


def check_states_are_kept_and_restored() -> None:
    for kind in KINDS:
        model = _model(seed=hvd_tf.rank())
        model.compile(hvd.DistributedOptimizer(kind.Adam(0.01)), "mse", run_eagerly=True)
        state = hvd.elastic.KerasState(model, batch=20 + hvd_tf.rank(), epoch=10 + hvd_tf.rank())
        state.sync()
        _same_everywhere(model.weights)
        assert (state.batch, state.epoch) == (20, 10)
        saved = [v.numpy() for v in [*model.weights, *_variables(model.optimizer)]]
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=100)
        update = hvd.elastic.UpdateBatchStateCallback(state)
        _fit(model, epochs=1)
        state.batch = 21
        state.restore()
        assert state.batch == 20
        _close([v.numpy() for v in [*model.weights, *_variables(model.optimizer)]], saved)
        state.batch = 0
        _fit(model, epochs=1, callbacks=[update, commit])
        committed = model.get_weights()
        _fit(model, epochs=1)
        state.restore()
        _close(model.get_weights(), committed)
        assert int(model.optimizer.iterations) == BATCHES


def check_metrics_are_means_and_the_best_model_is_kept() -> None:
    model = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", run_eagerly=True)
    with tempfile.TemporaryDirectory() as folder:
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = Path(folder) / "best.keras"
        seen = []
        watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
        _fit(model, callbacks=[hvd.callbacks.MetricAverageCallback(), watch, best])
        assert Path(best.filepath).exists()
    assert len(seen) == 2
    for logs in seen:
        everywhere = hvd.allgather(np.array([logs["loss"]]), name="loss").numpy()
        assert (everywhere == logs["loss"]).all()
