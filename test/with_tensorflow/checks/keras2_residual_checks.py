"""What lossy codecs hold back of Keras 2's gradients is in elastic states and in files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gradient_settings as settings
import numpy as np
import tensorflow as tf
from keras2_checks import KINDS, _fit, _model

import perseus.tensorflow.horovod as hvd_tf
import perseus.tensorflow.horovod.keras as hvd
from perseus.gradients import scopes
from perseus.keras.library import keras


def check_states_bring_back_what_was_held() -> None:
    with settings.apart():
        for kind in KINDS:
            _check(kind)


def _check(kind) -> None:
    model = _model(seed=hvd_tf.rank())
    optimizer = hvd.DistributedOptimizer(
        kind.SGD(0.05, momentum=0.9), compression=hvd.Compression.topk(0.1)
    )
    model.compile(optimizer, "mse")

    def held(optimizer=optimizer) -> dict[str, bytes]:
        found = optimizer.perseus_residuals.residuals()
        return {name: bytes(data) for name, (_, data) in found.items()}

    state = hvd.elastic.KerasState(model)
    state.sync()
    _fit(model, epochs=1)
    before = held()
    assert len(before) == 4 and any(any(data) for data in before.values())
    state.commit()
    _fit(model, epochs=1)
    after, weights = held(), model.get_weights()
    assert after != before
    state.restore()
    assert held() == before
    _fit(model, epochs=1)
    assert held() == after
    assert all(map(np.array_equal, model.get_weights(), weights))


def _compiled(make, **options):
    scopes._taken.clear()  # names begin anew, as in another process
    model = _model()
    optimizer = hvd.DistributedOptimizer(make(), compression=hvd.Compression.topk(0.1))
    if options.pop("scales", False):
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    return model


def _held(model) -> dict[str, bytes]:
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {name: bytes(data) for name, (_, data) in inner.perseus_residuals.residuals().items()}


def check_saved_models_go_on_with_what_they_held() -> None:
    new, legacy = KINDS
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        for make, scales, files in (
            (lambda: new.SGD(0.05, momentum=0.9), False, ("all.keras", "all.weights.h5", "tf")),
            (lambda: new.SGD(0.05, momentum=0.9), True, ("all.weights.h5", "tf")),
            (lambda: legacy.SGD(0.05, momentum=0.9), False, ("tf",)),  # .keras has not its state
        ):
            model = _compiled(make, scales=scales)
            _fit(model, epochs=1)
            held, paths = _held(model), [str(Path(folder) / file) for file in files]
            assert len(held) == 4 and any(any(data) for data in held.values())
            for path in paths:
                (model.save if path.endswith(".keras") else model.save_weights)(path)
            _fit(model, epochs=1)
            expected, after = model.get_weights(), _held(model)
            assert after != held
            for path in paths:
                again = _compiled(make, scales=scales)
                _fit(again, epochs=1)  # Keras 2 gives what it has made the saved values
                for trained in (model, again):
                    trained.load_weights(path)
                    assert _held(trained) == held, path
                _fit(again, epochs=1)
                assert _held(again) == after, path
                assert all(map(np.array_equal, again.get_weights(), expected)), path


def check_files_for_others() -> None:
    """Plain Keras reads them; one of another rank's, or without any, leaves nothing held."""
    with settings.apart(), tempfile.TemporaryDirectory() as mine:
        model = _compiled(lambda: KINDS[0].SGD(0.05, momentum=0.9))
        _fit(model, epochs=1)
        path = Path(settings.control.gather_lines(mine, "folder")[0]) / "root.keras"
        held = _held(model)
        if hvd_tf.rank() == 0:
            model.save(path)
        settings.control.gather_lines("", "saved")
        model.load_weights(path)
        assert _held(model) == (held if hvd_tf.rank() == 0 else {})
        plain = keras.models.load_model(path)
        assert all(map(np.array_equal, plain.get_weights(), model.get_weights()))
        settings.control.gather_lines("", "read")
        _fit(plain, epochs=1)  # makes metrics, which files have, too
        plain.save(Path(mine) / "plain.keras")
        model.load_weights(Path(mine) / "plain.keras")
        assert not _held(model)


def check_what_is_held_has_no_loss_scale() -> None:
    """Weights and residuals are those without scaling, while the scale goes up and down."""
    with settings.apart():
        for kind in KINDS:
            for compression in (hvd.Compression.topk(0.1), hvd.Compression.int8):
                for passes in (1, 2):
                    options = {"compression": compression, "backward_passes_per_step": passes}
                    scaled = _train(kind, True, **options)
                    plain = _train(kind, False, **options)
                    assert scaled == plain, (kind, compression, passes)


def _train(kind, scales: bool, **options):
    """Six steps by losses whose gradients are given, and one that a rank's Inf leaves out."""
    scopes._taken.clear()  # the same names: the same rank owns a result
    variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
    distributed = hvd.DistributedOptimizer(kind.SGD(0.5, momentum=0.5), **options)
    optimizer = distributed
    if scales:
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            distributed, initial_scale=2.0**10, dynamic_growth_steps=1
        )

    @tf.function
    def step(*slopes) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(s * v) for s, v in zip(slopes, variables, strict=True)])
        optimizer.minimize(loss, variables, tape=tape)

    scales_seen = set()
    for number in range(7):
        slopes = settings.whole(hvd_tf.rank(), number)
        if number == 3:
            if not scales:
                continue
            slopes[0][0] = np.inf if hvd_tf.rank() == 1 else 1.0
        step(*[tf.constant(slope, tf.float32) for slope in slopes])
        if scales:
            scales_seen.add(float(optimizer.loss_scale))
    assert len(scales_seen) == (5 if scales else 0), scales_seen
    held = distributed.perseus_residuals.residuals()
    assert len(held) == len(variables) and any(any(data) for _, data in held.values())
    bits = {name: bytes(data) for name, (_, data) in held.items()}
    return bits, [variable.numpy().tobytes() for variable in variables]
