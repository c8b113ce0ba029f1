"""The variables about gradients with the tape, in functions of TensorFlow."""

from __future__ import annotations

import gradient_settings as settings
import numpy as np
import tensorflow as tf
from tf_training import raised

import perseus.tensorflow.horovod as hvd


def _stepper(variables: list[tf.Variable]):
    """A function of coefficients, which are this rank's gradients; compiled."""

    @tf.function(autograph=False)
    def reduced(coefficients):
        with tf.GradientTape() as tape:
            products = zip(variables, coefficients, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * c) for v, c in products])
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        return tape.gradient(loss, variables)

    return reduced


def _reduce(given: list[settings.Arrays]) -> list[settings.Arrays]:
    reduced = _stepper([tf.Variable(tf.zeros(shape)) for shape in settings.SHAPES])
    return [[array.numpy() for array in reduced(arrays)] for arrays in given]


def check_dtype_and_scale() -> None:
    settings.dtype_and_scale(_reduce)


def check_int8() -> None:
    settings.int8(_reduce)


def check_top_k() -> None:
    settings.top_k(_reduce)


def check_powersgd() -> None:
    settings.powersgd(_reduce)


def _train_by(compiled: bool, given: list[settings.Arrays]) -> list[settings.Arrays]:
    variables = [tf.Variable(tf.zeros(shape)) for shape in settings.SHAPES]

    def step(*coefficients) -> None:
        with tf.GradientTape() as tape:
            products = zip(variables, coefficients, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * c) for v, c in products])
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(gradient / 8)

    run = tf.function(step, autograph=False) if compiled else step
    results = []
    for arrays in given:
        run(*map(tf.constant, arrays))
        results.append([variable.numpy() for variable in variables])
    hvd.synchronize_parameters()
    for variable in variables:
        gathered = hvd.allgather(variable[tf.newaxis]).numpy()
        assert all(np.array_equal(row, gathered[0]) for row in gathered)
    return results


def check_rotation() -> None:
    settings.rotation_of_parameters(lambda given: _train_by(False, given))
    settings.rotation_of_parameters(lambda given: _train_by(True, given))


def check_rotation_of_other_shapes_and_dtypes() -> None:
    """Scalars, fewer rows than parts, float64; a broadcast leaves nothing to correct."""
    with settings.apart():
        variables = [
            tf.Variable(tf.zeros([], tf.float64)),
            tf.Variable(tf.zeros([2, 3])),
            tf.Variable(tf.zeros([9, 2, 2])),
        ]

        @tf.function(autograph=False)
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in variables])
            codec = hvd.Compression.rotate(4)
            tape = hvd.DistributedGradientTape(tape, compression=codec)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(gradient * (hvd.rank() + 1.0))

        for _ in range(9):
            step()
        own = -9.0 * (hvd.rank() + 1)
        mean = -9.0 * (hvd.size() + 1) / 2
        for variable in variables:
            assert np.all(np.abs(variable.numpy() - mean) < abs(own - mean)), "pulled to the mean"
        hvd.synchronize_parameters()
        for variable in variables:
            np.testing.assert_allclose(variable.numpy(), mean, rtol=1e-5)
        step()
        hvd.broadcast_variables(variables, root_rank=0)
        root = [variable.numpy() for variable in variables]
        step()
        for variable, before in zip(variables, root, strict=True):
            np.testing.assert_allclose(variable.numpy(), before - hvd.rank() - 1, rtol=1e-5)


def check_what_rotation_cannot_do() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        x = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape)
        assert "tf.Variables" in raised(ValueError, lambda: tape.gradient(loss, [x]))
        variable = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = variable * (hvd.rank() + 1.0)
        (highest,) = hvd.DistributedGradientTape(tape, op=hvd.Max).gradient(loss, [variable])
        assert highest.numpy() == [hvd.size()]
        rotating = {"compression": hvd.Compression.rotate(2), "op": hvd.Max}
        message = raised(ValueError, lambda: hvd.DistributedGradientTape(tape, **rotating))
        assert "[tensorflow] Compression.rotate averages parameters" in message

        def compiled():
            with tf.GradientTape() as tape:
                loss = variable * 2.0
            return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

        function = tf.function(compiled, jit_compile=True, autograph=False)
        assert "jit_compile=True" in raised(NotImplementedError, function)


def check_the_shape_of_the_allreduce_changes_nothing() -> None:
    settings.shape_of_the_allreduce(_reduce)


def check_allgather_stacks_where_it_is_told_to() -> None:
    rows = [np.arange(3, dtype=np.float32) + 10 * r for r in range(hvd.size())]
    with settings.world_with(PERSEUS_CHANGE_HVD_ALLGATHER=0):
        for gather in (
            hvd.allgather,
            tf.function(lambda tensor: hvd.grouped_allgather([tensor])[0]),
        ):
            np.testing.assert_array_equal(gather(tf.constant(rows[hvd.rank()])), np.stack(rows))
        np.testing.assert_array_equal(hvd.allgather(tf.constant(hvd.rank())), range(hvd.size()))
        assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]
    with settings.world_with(PERSEUS_CHANGE_HVD_ALLGATHER=1):
        gathered = hvd.allgather(tf.constant(rows[hvd.rank()]))
        np.testing.assert_array_equal(gathered, np.concatenate(rows))


def check_a_nan_in_a_function() -> None:
    """Reported or raised; skipped ones are in tf_tape_checks."""
    good, last = settings.whole(hvd.rank(), 0), hvd.size() - 1
    bad = [array.copy() for array in good]
    if hvd.rank() == last:
        bad[1][7] = np.nan
    for action in ("report", "raise"):
        with (
            settings.world_with(
                PERSEUS_ALLREDUCE_NANCHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION=action
            ),
            settings.captured_stderr() as text,
        ):
            try:
                ((_, result),) = _reduce([bad])
            except tf.errors.OpError as error:
                assert action == "raise", error
                assert f"on rank {last}" in str(error)
                continue
            assert action == "report"
            assert np.isnan(result).nonzero()[0].tolist() == [7]
            assert any("NaN in the gradient" in line for line in text().splitlines()), text()


def check_a_slow_rank_is_named() -> None:
    with (
        settings.world_with(PERSEUS_PERF_CHECK_N_STEPS=2),
        settings.captured_stderr() as text,
    ):
        reduced = _stepper([tf.Variable(tf.zeros(shape)) for shape in settings.SHAPES])
        slow = settings.SlowRank(text)
        while not slow.named:
            slow.before_step()
            reduced(settings.whole(hvd.rank(), 0))
            slow.after_step()


def check_a_function_becomes_silent() -> None:
    """PERSEUS_OFFLINE_NEG: the right sums, and nothing is sent but data."""
    with settings.world_with(PERSEUS_OFFLINE_NEG=1):
        reduced = _stepper([tf.Variable(tf.zeros(shape)) for shape in settings.SHAPES])
        silence = settings.Silence()
        for step in range(200):
            results = reduced(settings.whole(hvd.rank(), step))
            expected = [
                sum(arrays)
                for arrays in zip(
                    *(settings.whole(rank, step) for rank in range(hvd.size())), strict=True
                )
            ]
            assert all(map(np.array_equal, results, expected)), step
            silence.after_step()
            if step % 8 == 7:
                silence.ask()
            if silence.reached:
                break
        assert silence.reached, silence.sent
