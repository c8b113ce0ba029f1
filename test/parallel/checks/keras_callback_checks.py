"""Callbacks and elastic states of Keras 3, on either of its frameworks."""

from __future__ import annotations

import importlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")

import keras
import numpy as np
from keras_training import (
    arrays_of,
    assert_close,
    assert_same_everywhere,
    count_operations,
    make_data,
    make_model,
    message_of,
)

import perseus.keras as hvd
from perseus.elastic import HostUpdateResult, notification_manager
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError

callbacks = hvd.callbacks


class _Watch(keras.callbacks.Callback):
    """Notes the learning rate of every batch, and metrics at the end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.logs.append(dict(logs))


def _fit(*what, optimizer=None, epochs: int = 3, model=None, **options):
    """Four batches an epoch; what a _Watch has seen."""
    model = make_model() if model is None else model
    if getattr(model, "optimizer", None) is None:
        model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
    watch = _Watch()
    model.fit(
        *make_data(hvd.rank()), batch_size=8, epochs=epochs, verbose=0, shuffle=False,
        callbacks=[*what, watch], **options,
    )  # fmt: skip
    return watch, model


def check_passes_of_weights_before_the_broadcast_are_dropped() -> None:
    for scales in (False, True):
        optimizer = inner = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01), backward_passes_per_step=6
        )
        if scales:
            optimizer = keras.optimizers.LossScaleOptimizer(inner)
        _fit(callbacks.BroadcastGlobalVariablesCallback(0), optimizer=optimizer, epochs=1)
        assert int(inner._agg_helper.counter) == 3


def check_the_first_batch_is_due_everywhere_where_the_root_has_begun() -> None:
    """Also inside a LossScaleOptimizer: two calls are one step, and the root has made the first."""
    for scales in (False, True):
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2))
        inner._iterations.assign(1 - hvd.rank())
        optimizer = keras.optimizers.LossScaleOptimizer(inner) if scales else inner
        steps = []

        class Counts(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, inner=inner, steps=steps) -> None:
                steps.append(int(inner.iterations))

        start = callbacks.BroadcastGlobalVariablesCallback(0)
        _, model = _fit(start, Counts(), optimizer=optimizer, epochs=1)
        assert steps == [1, 1, 2, 2], steps
        assert_same_everywhere(model.weights)


def check_counts_that_decide_nothing_are_not_broadcast_before_the_first_batch() -> None:
    """A MultiOptimizer may know its inner ones on the root alone, if that has loaded a model."""
    inner = [keras.optimizers.SGD(0.01, gradient_accumulation_steps=2) for _ in range(2)]
    choice = keras.optimizers.MultiOptimizer(lambda variable: inner[len(variable.shape) % 2])
    optimizer, model = hvd.DistributedOptimizer(choice), make_model()
    if hvd.rank() == 0:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    start = callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*make_data(hvd.rank()), batch_size=8, verbose=0, callbacks=[start])
    assert_same_everywhere(model.weights)


def check_metrics_are_means_over_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    logs = {"b": float(rank), "a": 10.0 * rank + 1, "c": np.float32(0.5)}
    callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (size - 1) / 2
    assert logs == {"b": mean, "a": 10 * mean + 1, "c": 0.5}, logs
    alone, _ = _fit(epochs=1)
    together, _ = _fit(callbacks.MetricAverageCallback(), epochs=1)
    expected = hvd.allreduce(np.float64(alone.logs[0]["loss"]), name="loss")
    np.testing.assert_allclose(together.logs[0]["loss"], float(expected), rtol=1e-6)


def check_all_ranks_average_the_same_metrics() -> None:
    rank, size = hvd.rank(), hvd.size()
    average = callbacks.MetricAverageCallback().on_epoch_end
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    pair, single = np.ones(2), np.ones(1)
    for of_root, of_others, expected in (
        ({"a": 1.0, "b": 2.0}, {"a": 1.0}, f"b on rank 0, none of these on {others}."),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}, f"b on rank 0, c on {others}."),
        ({"a": pair, "b": single}, {"a": single, "b": pair}, "a of shape (2,), b of shape (1,) on"),
    ):
        logs = dict(of_root if rank == 0 else of_others)
        text = message_of(MismatchError, average, 0, logs)
        assert text.startswith("[keras] MetricAverageCallback: metrics differ"), text
        assert expected in text, text
        assert logs == (of_root if rank == 0 else of_others)


def check_metrics_are_averaged_after_a_rank_has_joined() -> None:
    if hvd.rank() != hvd.size() - 1:
        logs = {"loss": float(hvd.size())}
        callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        assert logs == {"loss": hvd.size() - 1.0}
    importlib.import_module(f"perseus.{keras.backend.backend()}.horovod").join()


def check_a_lone_callback_is_refused_where_it_would_run_beside_the_next_batch() -> None:
    class State:
        batch = epoch = 0

        def commit(self) -> None:
            pass

    for make in (
        lambda: callbacks.BroadcastGlobalVariablesCallback(0),
        lambda: hvd.elastic.CommitStateCallback(State()),
        lambda: hvd.elastic.UpdateBatchStateCallback(State()),
    ):
        model = make_model()
        model.compile(keras.optimizers.SGD(0.01), "mse")

        def fit(given, model=model) -> None:
            model.fit(*make_data(hvd.rank()), batch_size=8, verbose=0, callbacks=given)

        if keras.backend.backend() == "torch":
            assert "callbacks=[...]" in message_of(ValueError, fit, make())
        else:
            fit(make())
        fit([make()])


def check_metrics_with_several_values_are_means_over_ranks() -> None:
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    scores = keras.ops.convert_to_tensor([float(rank), 1.0, 3.0 * rank])
    table = np.full((2, 2), rank, np.float32)
    logs = {"loss": np.float32(rank), "f1": scores, "table": table, "val_loss": 2.0}
    count = count_operations(lambda: callbacks.MetricAverageCallback().on_epoch_end(0, logs))
    assert count == 2  # a comparison and a mean
    assert (logs["loss"], logs["val_loss"]) == (mean, 2.0)
    assert isinstance(logs["loss"], float)
    assert logs["f1"].tolist() == [mean, 1.0, 3 * mean]
    assert logs["table"].tolist() == [[mean, mean], [mean, mean]]


def check_the_learning_rate_warms_up() -> None:
    size = hvd.size()
    watch, _ = _fit(callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2))
    expected = [0.4 / size * ((step + 1) / 4 * (size - 1) / 2 + 1) for step in range(8)]
    np.testing.assert_allclose(watch.rates, [*expected, *[0.4] * 4], rtol=1e-6)
    np.testing.assert_allclose([log["lr"] for log in watch.logs], watch.rates[3::4], rtol=1e-6)


def check_each_fit_has_its_own_steps_per_epoch() -> None:
    """In a world of another size, a rank that has trained counts as one that is new."""
    size = hvd.size()
    warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)
    schedule = callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 1 + epoch, staircase=False)
    given = callbacks.LearningRateScheduleCallback(
        0.4, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=8
    )
    for steps in (4, 2):
        for callback, rise, first, of in (
            (warmup, (size - 1) / size, 1 / size, steps),
            (schedule, 1, 1, steps),
            (given, 1, 1, 8),
        ):
            watch, _ = _fit(callback, epochs=1, steps_per_epoch=steps)
            done = np.arange(steps) + (callback is warmup)
            np.testing.assert_allclose(watch.rates, 0.4 * (first + rise * done / of), rtol=1e-6)
    assert given.steps_per_epoch == 8
    schedule.set_params({"steps": None})  # as with a generator
    schedule.on_train_begin()
    assert schedule.steps_per_epoch == 2


def check_the_learning_rate_follows_a_schedule() -> None:
    make = callbacks.LearningRateScheduleCallback
    watch, _ = _fit(make(0.2, 0.5, start_epoch=1))
    assert np.allclose(watch.rates, [0.01] * 4 + [0.2] * 4 + [0.1] * 4)
    watch, _ = _fit(make(0.2, lambda epoch: 1 + epoch, end_epoch=2))
    assert np.allclose(watch.rates, [0.2] * 4 + [0.4] * 8)
    watch, _ = _fit(make(0.2, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=8))
    steps = [1 + epoch + batch / 8 for epoch in range(3) for batch in range(4)]
    assert np.allclose(watch.rates, [0.2 * step for step in steps])
    watch, _ = _fit(make(0.1, 0.5, start_epoch=1, end_epoch=3, staircase=False), epochs=4)
    decayed = [0.1 * 0.5 ** (step / 4) for step in range(8)]
    assert np.allclose(watch.rates, [0.01] * 4 + decayed + decayed[-1:] * 4), watch.rates
    assert "initial_lr" in message_of(ValueError, make, None, 0.5)


class _Overriding(callbacks.LearningRateScheduleCallback):
    """Overrides the methods of Horovod's callback that scripts override, and notes the calls."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.calls: list[object] = []

    def _autodetect_steps_per_epoch(self) -> int:
        return 2 * super()._autodetect_steps_per_epoch()

    def _adjust_learning_rate(self, epoch: float) -> None:
        self.calls.append(epoch)
        super()._adjust_learning_rate(epoch)

    def _restore_momentum_if_needed(self) -> None:
        self.calls.append("restored")
        super()._restore_momentum_if_needed()


def check_a_subclass_overrides_horovods_methods() -> None:
    own = _Overriding(0.2, lambda epoch: 1 + epoch, end_epoch=1, staircase=False)
    watch, _ = _fit(own, epochs=2)
    steps = [batch / 8 for batch in range(4)]
    assert np.allclose(watch.rates, [0.2 * (1 + step) for step in [*steps, *steps[-1:] * 4]])
    adjusted = [call for step in steps for call in (step, "restored")]
    assert own.calls == adjusted + ["restored"] * 4, own.calls
    by_epoch = _Overriding(0.2, lambda epoch: 1 + epoch)
    _fit(by_epoch, epochs=2)
    assert [call for call in by_epoch.calls if call != "restored"] == [0, 1], by_epoch.calls


def check_a_subclass_changes_momentum_for_one_batch() -> None:
    class Own(callbacks.LearningRateScheduleCallback):
        def _adjust_learning_rate(self, epoch: float) -> None:
            self.restore_momentum = self.model.optimizer.momentum
            self.model.optimizer.momentum = 0.25

    assert Own(0.1, 0.5).backend is keras.backend
    found = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None) -> None:
            found.append(self.model.optimizer.momentum)

        on_train_batch_end = on_train_batch_begin

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.75))
    _fit(Own(0.1, 0.5), Watch(), optimizer=optimizer, epochs=1)
    assert found == [0.25] + [0.75] * 7, found


def check_momentum_is_corrected() -> None:
    # v = m v - lr g, and where lr changes by a factor, so does m in that batch.
    def schedule(epoch):
        return 1.0 if epoch < 0.5 else 0.25

    rates = [0.04] * 2 + [0.01] * 2
    for corrects in (True, False):
        make = callbacks.LearningRateScheduleCallback
        change = make(0.04, schedule, staircase=False, momentum_correction=corrects)
        optimizer = keras.optimizers.SGD(0.04, momentum=0.9)
        _, model = _fit(change, optimizer=optimizer, epochs=1)
        reference = make_model()
        plain = keras.optimizers.SGD(1.0)
        reference.compile(plain, "mse")
        velocities = [np.zeros(w.shape) for w in reference.weights]
        x, y = make_data(hvd.rank())
        for step, rate in enumerate(rates):
            before = arrays_of(reference.weights)
            part = slice(8 * step, 8 * step + 8)
            reference.fit(x[part], y[part], batch_size=8, verbose=0)
            gradients = [a - b for a, b in zip(before, arrays_of(reference.weights), strict=True)]
            momentum = 0.9 * (0.25 if corrects and step == 2 else 1.0)
            for i, weight in enumerate(reference.weights):
                velocities[i] = momentum * velocities[i] - rate * gradients[i]
                weight.assign(before[i] + velocities[i])
        assert_close(model.weights, reference.weights, 1e-4)


def _scaled(optimizer, variable) -> list[float]:
    """What a step leaves in an optimizer's momenta, divided into that after the rate is halved."""
    model = make_model()
    model.compile(optimizer, "mse")
    optimizer.build([variable, *model.trainable_variables])
    gradients = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    momenta = getattr(optimizer, "momentums", None) or optimizer._momentums
    before = arrays_of(each for each in momenta if each is not None)
    change = callbacks.LearningRateScheduleCallback(0.25, 0.5)
    change.set_model(model)
    change.current_epoch = 1
    change.on_batch_begin(0)
    after = arrays_of(each for each in momenta if each is not None)
    assert len(after) == len(model.trainable_variables)
    return [float((b / a).max()) for a, b in zip(before, after, strict=True)]


class Derived(keras.optimizers.SGD):
    pass


def check_only_momentum_that_contains_the_rate_is_corrected() -> None:
    for make, factor in (
        (keras.optimizers.SGD, 0.5),
        (Derived, 0.5),
        (keras.optimizers.RMSprop, 0.5),
        (getattr(keras.optimizers, "Muon", None), 1.0),
    ):
        for wrap in (lambda optimizer: optimizer, hvd.DistributedOptimizer):
            # Has no momentum, since its gradients are its values.
            overwritten = keras.Variable(np.zeros(2, "float32"), trainable=True)
            overwritten.overwrite_with_gradient = True
            if make is not None:
                optimizer = wrap(make(0.25, momentum=0.9))
                found = _scaled(optimizer, overwritten)
                np.testing.assert_allclose(found, factor)


def check_the_best_model_is_kept() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for only_weights, name in ((False, "best.keras"), (True, "best.weights.h5")):
            best = callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=only_weights)
            assert best.filepath is None and best.save_best_only
            text = message_of(ValueError, _fit, best)
            assert "filepath" in text
            best.filepath = Path(folder) / name
            _, model = _fit(best)
            loaded = make_model(seed=9)
            if only_weights:
                loaded.load_weights(best.filepath)
            else:
                loaded = keras.models.load_model(best.filepath)
            assert_close(loaded.weights, model.weights, 0)  # the loss goes down


def check_states_are_kept_and_restored() -> None:
    rank = hvd.rank()
    model = make_model(seed=rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd.elastic.KerasState(model, epoch=rank, batch=0)
    state.sync()
    assert state.epoch == 0
    assert_same_everywhere([*model.weights, *model.optimizer.variables])
    _fit(model=model, epochs=1)
    trained = arrays_of([*model.weights, *model.optimizer.variables])
    state.epoch = 1
    state.commit()
    _fit(model=model, epochs=1)
    assert not np.array_equal(arrays_of(model.weights)[0], trained[0])
    state.epoch = 2
    state.restore()
    assert_close([*model.weights, *model.optimizer.variables], trained, 0)
    assert state.epoch == 1
    text = message_of(ValueError, hvd.elastic.KerasState, keras.Sequential([keras.layers.Dense(1)]))
    assert "build it" in text


def check_training_goes_on_in_a_new_world() -> None:
    rank = hvd.rank()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    worlds: list[None] = []
    state.register_reset_callbacks([lambda: worlds.append(None)])
    seen: list[tuple[int, int]] = []

    class _Break(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None) -> None:
            # The others are stopped by the end of the world, in the next batch.
            if len(worlds) == 0 and (state.epoch, batch) == (1, 1) and rank == hvd.size() - 1:
                raise HorovodInternalError("broken for a test")

        def on_epoch_end(self, epoch, logs=None) -> None:
            seen.append((len(worlds), state.epoch))
            if len(worlds) == 1 and state.epoch == 3:
                if rank == 0:
                    notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
                try:
                    state.check_host_updates()
                except HostsUpdatedInterrupt:
                    seen.append((-1, state.epoch))
                    raise

    @hvd.elastic.run
    def train(state):
        _fit(
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            _Break(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            model=model,
            epochs=4 - state.epoch,
        )

    train(state)
    # The second epoch began again after the failure; the third was finished, if not committed.
    assert seen == [(0, 1), (1, 2), (1, 3), (-1, 3), (2, 4)], seen
    assert (len(worlds), state.epoch, state.batch) == (2, 4, 0)
    assert_same_everywhere(model.weights)
    reference = make_model()
    reference.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    _fit(model=reference, epochs=4)
    assert_close(model.weights, reference.weights, 1e-5)


def check_a_callback_of_an_earlier_world_broadcasts_to_new_ranks() -> None:
    callback = callbacks.BroadcastGlobalVariablesCallback(0)
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")
    _fit(callback, model=model, epochs=1)
    hvd.shutdown()
    hvd.init()
    if hvd.rank() > 0:  # like a new process
        callback = callbacks.BroadcastGlobalVariablesCallback(0)
        model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    _fit(callback, model=model, epochs=1)
    assert callback.broadcast_done
    assert_same_everywhere([*model.weights, *model.optimizer.variables])


def check_states_are_committed_in_fit() -> None:
    class State:
        """Notes what it held at every commit."""

        batch = epoch = 0
        commits: list[tuple[int, int]]

        def commit(self) -> None:
            self.commits.append((self.epoch, self.batch))

    state = State()
    state.commits = []
    state.epoch = 5
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=3)
    update = hvd.elastic.UpdateBatchStateCallback(state)
    _fit(update, commit, hvd.elastic.UpdateEpochStateCallback(state), epochs=2)
    assert state.commits == [(5, 2), (5, 0), (6, 2), (6, 0)], state.commits
    assert state.epoch == 7


def check_unmodified_scripts_for_horovod_train() -> None:
    """horovod.keras on either framework, horovod.tensorflow.keras on its own."""
    importlib.import_module("perseus.compat.horovod")
    names = ["horovod.keras"]
    if keras.backend.backend() == "tensorflow":
        names.append("horovod.tensorflow.keras")
    reference = make_model()
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    parts = [make_data(rank) for rank in range(hvd.size())]
    for start in range(0, 32, 8):
        reference.train_on_batch(
            *(np.concatenate([part[k][start : start + 8] for part in parts]) for k in (0, 1))
        )
    for name in names:
        theirs = importlib.import_module(name)
        theirs.init()
        model = make_model()
        model.compile(theirs.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
        start = theirs.callbacks.BroadcastGlobalVariablesCallback(0)
        _fit(start, theirs.callbacks.MetricAverageCallback(), model=model, epochs=1)
        assert start.broadcast_done
        assert_close(model.weights, reference.weights, 1e-4)
        assert_same_everywhere([*model.weights, *model.optimizer.variables])
