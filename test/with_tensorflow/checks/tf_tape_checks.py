"""DistributedGradientTape: the gradients of all ranks, in eager mode and in tf.function."""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import partial

import gradient_settings as settings
import numpy as np
import tensorflow as tf
from tf_training import (
    assert_equal_on_all_ranks,
    global_batch,
    loss_of,
    raised,
    share,
    variables,
)
from worlds import world_with

import perseus.tensorflow.horovod as hvd


def _mean_rank() -> float:
    return (hvd.size() - 1) / 2


def check_training_equals_one_rank_on_the_global_batch() -> None:
    """Plain, compiled, in groups, with a factor: like one rank, and equal bits on all ranks."""
    for compiled in (False, True):
        for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
            mine, reference = variables(), variables()

            def step(batch, mine=mine, options=options):
                with tf.GradientTape() as tape:
                    loss = loss_of(mine, batch)
                tape = hvd.DistributedGradientTape(tape, **options)
                for variable, gradient in zip(mine, tape.gradient(loss, mine), strict=True):
                    variable.assign_sub(0.1 * gradient)

            if compiled:
                step = tf.function(step)
            for number in range(4):
                batch = global_batch(number)
                step(tf.constant(share(batch)))
                with tf.GradientTape() as plain:
                    loss = loss_of(reference, batch)
                for variable, gradient in zip(
                    reference, plain.gradient(loss, reference), strict=True
                ):
                    variable.assign_sub(0.1 * gradient)
            for left, right in zip(mine, reference, strict=True):
                np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=2e-5, atol=2e-6)
            assert_equal_on_all_ranks(mine)


def check_autograph_leaves_this_package_as_it_is() -> None:
    """It would take seconds, and warns of syntax that it does not know."""
    variable = tf.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2) * (hvd.rank() + 1)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
        return gradient, hvd.allreduce(loss, op=hvd.Sum), hvd.allgather(loss[tf.newaxis])

    told = io.StringIO()
    tf.autograph.set_verbosity(1, alsologtostdout=True)
    try:
        with contextlib.redirect_stdout(told):
            gradient, total, losses = tf.function(step)()
    finally:
        tf.autograph.set_verbosity(0, alsologtostdout=False)
    ranks = np.arange(1.0, hvd.size() + 1)
    np.testing.assert_array_equal(gradient, 2 * np.array([1.0, 2.0]) * ranks.mean())
    np.testing.assert_array_equal(total, 5 * ranks.sum())
    np.testing.assert_array_equal(losses, 5 * ranks)
    rewritten = [line for line in told.getvalue().splitlines() if "is not cached" in line]
    assert any("step" in line for line in rewritten), told.getvalue()
    assert not [line for line in rewritten if "perseus" in line], rewritten


class _Scaled:
    """A script's compressor that looks at values."""

    @staticmethod
    def compress(tensor):
        largest = tf.reduce_max(tf.abs(tensor))
        if largest > 1.0:
            tensor /= largest
        return tensor, largest

    @staticmethod
    def decompress(tensor, largest):
        if largest > 1.0:
            tensor *= largest
        return tensor


class _Halving(tf.GradientTape):
    """A script's tape that looks at values."""

    def gradient(self, *args, **kwargs):
        (gradient,) = super().gradient(*args, **kwargs)
        if tf.reduce_max(gradient) > 1.0:
            gradient *= 0.5
        return [gradient]


def check_code_of_the_script_in_this_package_may_depend_on_values() -> None:
    """AutoGraph rewrites it, too, where it rewrites the script."""
    variable = tf.Variable([3.0, 4.0])

    def reduced():
        return hvd.allreduce(variable, op=hvd.Sum, compression=_Scaled)

    def gradient():
        with hvd.DistributedGradientTape(_Halving(), compression=_Scaled) as tape:
            loss = tf.reduce_sum(variable**2)
        return tape.gradient(loss, [variable])[0]

    size = hvd.size()
    for function, expected in ((reduced, [3.0 * size, 4.0 * size]), (gradient, [3.0, 4.0])):
        np.testing.assert_allclose(tf.function(function)(), expected, rtol=1e-6)


def check_each_reduction() -> None:
    variable = tf.Variable([1.0, 2.0, 3.0])
    factor = tf.constant([1.0, 2.0, 5.0]) * (hvd.rank() + 1)
    n = hvd.size()
    expected = {hvd.Average: (n + 1) / 2, hvd.Sum: n * (n + 1) / 2, hvd.Min: 1.0, hvd.Max: n}
    for op, scale in expected.items():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * factor)
        tape = hvd.DistributedGradientTape(tape, op=op)
        gradient = tape.gradient(loss, variable)
        np.testing.assert_allclose(gradient, np.array([1.0, 2.0, 5.0]) * scale, rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * tf.constant([1.0, 2.0, 5.0]))
    tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum)  # of equal gradients: themselves
    np.testing.assert_allclose(tape.gradient(loss, variable), [1.0, 2.0, 5.0], rtol=1e-6)


def check_sources_keep_their_structure_and_none_stays_none() -> None:
    first, second, unused = tf.Variable([2.0]), tf.Variable([[3.0]]), tf.Variable(1.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = (hvd.rank() + 1.0) * tf.reduce_sum(first * first + second[0])
    gradients = tape.gradient(loss, {"a": first, "rest": [second, unused]})
    np.testing.assert_allclose(gradients["a"], [4.0 * (_mean_rank() + 1)], rtol=1e-6)
    np.testing.assert_allclose(gradients["rest"][0], [[_mean_rank() + 1]], rtol=1e-6)
    assert gradients["rest"][1] is None
    assert tape.applies is True
    again = tape.gradient(loss, first, use_generic_names=True)
    np.testing.assert_allclose(again, [4.0 * (_mean_rank() + 1)], rtol=1e-6)
    assert isinstance(tape, tf.GradientTape)
    assert type(tape).__name__ == "GradientTape"


def _embedding_gradient(**options):
    table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))
    rows = [hvd.rank(), 5, 5][: 2 + hvd.rank() % 2]  # different numbers of rows
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, rows)) * (hvd.rank() + 1.0)
    gradient = hvd.DistributedGradientTape(tape, **options).gradient(loss, table)
    expected = np.zeros((6, 2))
    for rank in range(hvd.size()):
        for row in [rank, 5, 5][: 2 + rank % 2]:
            expected[row] += rank + 1
    return gradient, expected


def check_sparse_gradients() -> None:
    for traced in (False, True):
        for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}):

            def run(options=options):
                return _embedding_gradient(**options)[0]

            expected = _embedding_gradient()[1]
            if traced:
                with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                    gradient = _embedding_gradient(**options)[0]
                    assert isinstance(gradient, tf.IndexedSlices)
                    session.run(tf.compat.v1.global_variables_initializer())
                    dense = session.run(tf.convert_to_tensor(gradient))
            else:
                gradient = run()
                assert isinstance(gradient, tf.IndexedSlices)
                dense = tf.convert_to_tensor(gradient).numpy()
            np.testing.assert_allclose(dense, expected / hvd.size(), rtol=1e-6)
    gradient, expected = _embedding_gradient(op=hvd.Sum, sparse_as_dense=True)
    assert not isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    for options in ({"op": hvd.Max}, {"gradient_predivide_factor": 2.0}):
        message = raised(NotImplementedError, lambda o=options: _embedding_gradient(**o))
        assert "sparse_as_dense=True" in message


def check_allreduce_of_slices() -> None:
    slices = tf.IndexedSlices(
        tf.constant([[1.0 + hvd.rank()]]), tf.constant([hvd.rank()]), tf.constant([4, 1])
    )
    expected = np.zeros((4, 1), np.float32)
    expected[: hvd.size(), 0] = np.arange(1, hvd.size() + 1)
    total = hvd.allreduce(slices, op=hvd.Sum, name="slices")
    np.testing.assert_allclose(tf.convert_to_tensor(total), expected, rtol=1e-6)
    mean, dense = hvd.grouped_allreduce([slices, tf.constant(2.0 * hvd.rank())])
    np.testing.assert_allclose(tf.convert_to_tensor(mean), expected / hvd.size(), rtol=1e-6)
    assert float(dense) == 2 * _mean_rank()
    assert "IndexedSlices" in raised(
        NotImplementedError, lambda: hvd.allreduce(slices, prescale_factor=2.0)
    )


def check_the_mean_of_integer_slices_keeps_its_halves() -> None:
    for dtype in (tf.int32, tf.int64):
        rows = tf.constant([[2 * hvd.rank() + 1], [4 * hvd.rank()]], dtype)
        slices = tf.IndexedSlices(rows, tf.constant([3, hvd.rank()]), tf.constant([4, 1]))
        mean = hvd.allreduce(slices, op=hvd.Average)
        assert mean.values.dtype == tf.float64
        # Every rank has a row 3: 1, 3, 5, ... together are size * size.
        row = tf.math.unsorted_segment_sum(mean.values, mean.indices, 4)[3]
        np.testing.assert_allclose(row, [hvd.size()], rtol=1e-15)


def check_local_sources() -> None:
    for make, scale in ((tf.Variable, True), (tf.Variable, False), (tf.constant, False)):
        shared, own = make([1.0]), make([1.0])
        with tf.GradientTape() as tape:
            tape.watch([shared, own])
            loss = tf.reduce_sum(shared + own) * (hvd.rank() + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(own)
        first, second = tape.get_local_and_global_gradients(loss, [shared, own])
        assert [source is own for source, _ in first] == [True]
        assert [source is shared for source, _ in second] == [True]
        local = (hvd.rank() + 1) / (hvd.size() if scale else 1)
        np.testing.assert_allclose(first[0][1], [local], rtol=1e-6)
        np.testing.assert_allclose(second[0][1], [_mean_rank() + 1], rtol=1e-6)


def check_local_layers() -> None:
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    shared = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]) * (hvd.rank() + 1.0))) * shared
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, op=hvd.Sum)
    kernel, of_shared = tape.gradient(loss, [layer.trainable_weights[0], shared])
    np.testing.assert_allclose(kernel, [[(hvd.rank() + 1) / hvd.size()]] * 2, rtol=1e-6)
    assert float(of_shared) == sum(2 * (rank + 1) for rank in range(hvd.size()))
    assert "local_layers" in raised(
        ValueError, lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1])
    )
    without_weights = tf.keras.layers.Dense(1)
    assert "build the model first" in raised(
        ValueError,
        lambda: hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=[layer, without_weights]
        ),
    )


class _Halved(hvd.compression.Compressor):
    """One of a script's own: what travels is half as large."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        assert ctx == tensor.dtype
        return tensor * 2


class _HalvedToo(hvd.Compression.none):
    """The same, derived as scripts for Horovod do."""

    compress = staticmethod(lambda tensor: (tensor / 2, calls.append("compress")))
    decompress = staticmethod(lambda tensor, ctx: tensor * 2)


class _HalvedAlone:
    """The same without a base class."""

    compress, decompress = _HalvedToo.compress, _HalvedToo.decompress


calls: list[str] = []


def check_compressors_of_scripts_are_called() -> None:
    for compression in (_HalvedToo, _HalvedAlone):
        calls.clear()
        variable = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        np.testing.assert_allclose(tape.gradient(loss, variable), [2.0, 4.0], rtol=1e-6)
        mean = hvd.allreduce(tf.constant([3.0]), compression=compression)
        np.testing.assert_allclose(mean, [3.0], rtol=1e-6)
        assert len(calls) == 2, calls


def check_compression() -> None:
    codecs = hvd.Compression
    for compression in (
        codecs.none, codecs.fp16, codecs.bf16, codecs.int8, codecs.topk(0.5), codecs.rotate(2),
        codecs.auto, _Halved, _HalvedToo, _HalvedAlone,
    ):  # fmt: skip
        for _ in range(2):
            variable = tf.Variable([1.0, 2.0])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            gradient = tape.gradient(loss, [variable])[0]
            # One host: codecs do not act there.
            np.testing.assert_allclose(gradient, [_mean_rank() + 1] * 2, rtol=1e-6)
    mean = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), compression=codecs.fp16)
    assert mean.dtype == tf.float32
    assert float(mean[0]) == _mean_rank() + 1
    assert "name=" in raised(
        ValueError, lambda: hvd.allreduce(tf.constant([1.0]), compression=codecs.int8)
    )


def _gradient_of_ranks(variable: tf.Variable, factor: float):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * factor)
    tape = hvd.DistributedGradientTape(tape)
    return tape.gradient(loss, variable), tape.applies


def check_steps_that_are_not_applied_give_zeros() -> None:
    variable = tf.Variable([1.0, 1.0])
    with warnings.catch_warnings(record=True) as seen, world_with(PERSEUS_ACCUMULATE_N_STEPS=3):
        warnings.simplefilter("always")
        for run in (_gradient_of_ranks, tf.function(_gradient_of_ranks)):
            for step in range(6):
                gradient, applies = run(variable, tf.constant(hvd.rank() + 1.0 + step))
                last = step % 3 == 2
                assert bool(applies) == last
                total = 3 * (_mean_rank() + step) if last else 0.0
                np.testing.assert_allclose(gradient, [total] * 2, rtol=1e-6)
        assert "sparse_as_dense=True" in raised(ValueError, _embedding_gradient)
    assert any("tape.applies" in str(warning.message) for warning in seen)
    settings = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    with world_with(**settings):
        factor = float("nan") if hvd.rank() == hvd.size() - 1 else 1.0
        gradient, applies = _gradient_of_ranks(variable, factor)
        assert not bool(applies)
        np.testing.assert_allclose(gradient, [0.0, 0.0], rtol=1e-6)
        gradient, applies = _gradient_of_ranks(variable, 2.0)
        assert bool(applies)
        np.testing.assert_allclose(gradient, [2.0, 2.0], rtol=1e-6)


def check_missing_gradients_count_as_zeros_in_sums_over_steps() -> None:
    used, other = tf.Variable([1.0]), tf.Variable([1.0])

    def run(both: bool, factor: float):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * factor)
            if both:
                loss += tf.reduce_sum(other * factor)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        return tape.gradient(loss, [used, other]), tape.applies

    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        for wrap in (lambda function: function, tf.function):
            reduced = wrap(run)
            # Each rank misses one in another step.
            _, applies = reduced(hvd.rank() == 0, tf.constant(2.0))
            assert not bool(applies)
            gradients, applies = reduced(hvd.rank() != 0, tf.constant(5.0))
            assert bool(applies)
            size = hvd.size()
            np.testing.assert_allclose(gradients, [[7.0 * size], [2.0 + 5.0 * (size - 1)]])


def check_models_with_equal_names_have_sums_of_their_own() -> None:
    """As in a GAN, whose tapes may take turns."""
    for make in (lambda: tf.Variable([1.0]), lambda: tf.Variable([1.0], name="weight")):
        models = [make(), make()]
        with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
            for wrap in (lambda function: function, tf.function):
                runs = [wrap(partial(_gradient_of_ranks, variable)) for variable in models]
                for step in range(4):
                    for number, run in enumerate(runs):
                        gradient, applies = run(tf.constant(hvd.rank() + 10.0 * number))
                        assert bool(applies) == (step % 2 == 1), (step, number)
                        if step % 2:
                            total = 2 * (_mean_rank() + 10 * number)
                            np.testing.assert_allclose(gradient, [total], rtol=1e-6)


def check_models_with_equal_names_rotate_apart() -> None:
    def step(variable: tf.Variable, slope: float) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * slope)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.rotate(2))
        tape.gradient(loss, variable)

    with settings.apart():
        models = [tf.Variable(tf.fill([4], hvd.rank() + 10.0 * number)) for number in range(2)]
        for _ in range(2):
            for variable in models:
                step(variable, 0.0)
        hvd.synchronize_parameters()
        for number, variable in enumerate(models):
            np.testing.assert_allclose(variable, [_mean_rank() + 10 * number] * 4)


def check_arguments_that_do_not_fit() -> None:
    variable = tf.Variable(1.0)
    for options in (
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"groups": 0},
        {"groups": [variable]},
        {"groups": [[variable], [variable]]},
    ):
        raised(ValueError, lambda o=options: hvd.DistributedGradientTape(tf.GradientTape(), **o))


def check_groups_of_variables() -> None:
    several = [tf.Variable([float(i)]) for i in range(4)]
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.add_n([(i + 1.0) * v for i, v in enumerate(several)])[0] * (hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape, groups=[[several[2], several[0]]])
        gradients = tape.gradient(loss, several)
        for i, gradient in enumerate(gradients):
            np.testing.assert_allclose(gradient, [(i + 1) * (_mean_rank() + 1)], rtol=1e-6)


def _own_gradients(rank: int) -> list:
    """Of a script's own making: dense, none, sparse, half-precision."""
    shape = tf.constant([hvd.size(), 2])
    rows = tf.IndexedSlices(tf.constant([[1.0 + rank, 2.0]]), tf.constant([rank]), shape)
    return [tf.constant([1.0, 10.0 * rank]), None, rows, tf.constant(3.0 * rank, tf.float16)]


def check_scripts_reduce_gradients_by_horovods_function() -> None:
    """As optimizers of their own do; without variables, and with as many arguments as it had."""
    size, own = hvd.size(), _own_gradients(hvd.rank())
    several = [tf.Variable(0.0, name=f"v{i}") for i in range(len(own))]
    means = [
        np.array([1.0, 10.0 * _mean_rank()]),
        np.array([[1.0 + rank, 2.0] for rank in range(size)]) / size,
        np.array(3.0 * _mean_rank()),
    ]
    for number, (sparse_as_dense, arguments, given, factor) in enumerate(
        (
            (True, (), (), 1),
            (True, (hvd.Average, 2.0, 0), (), 1),
            (False, (hvd.Sum,), (several,), size),
            (True, (hvd.Sum, 1.0, 2), (several,), size),
            (True, (hvd.Average, 1.0, [several[:1], several[2:]]), (several, True), 1),
        )
    ):
        make = hvd._make_allreduce_grads_fn
        name, none = f"Own{number}", hvd.Compression.none
        reduce = make(name, "", "", none, sparse_as_dense, *arguments)
        for run in (reduce, tf.function(reduce)):
            dense, missing, sparse, half = run(own, *given)
            assert missing is None
            assert isinstance(sparse, tf.IndexedSlices) != sparse_as_dense
            assert half.dtype == tf.float16
            for mine, mean in zip((dense, tf.convert_to_tensor(sparse), half), means, strict=True):
                np.testing.assert_allclose(mine, mean * factor, rtol=1e-3)
    text = raised(ValueError, lambda: make("Own", "", "", none, False, hvd.Sum, 2.0))
    assert "gradient_predivide_factor" in text


def check_horovods_function_gives_zeros_in_steps_that_are_not_applied() -> None:
    variable, rank = tf.Variable([1.0, 1.0]), hvd.rank()
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        none = hvd.Compression.none
        reduce = hvd._make_allreduce_grads_fn("Held", "", "", none, False, hvd.Sum)
        for step in range(4):
            gradient, other = reduce([tf.constant([1.0, rank]), None], [variable, variable])
            last = step % 2
            total = [2 * hvd.size() * last, 4 * _mean_rank() * hvd.size() / 2 * last]
            np.testing.assert_allclose(gradient, total)
            np.testing.assert_allclose(other, [0.0, 0.0])
        raised(ValueError, lambda: reduce([tf.constant([1.0]), None]))


def check_process_sets() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        members = hvd.add_process_set([hvd.size() - 1])
        variable = tf.Variable([1.0])
        for process_set, expected in ((members, hvd.rank() + 1), (None, _mean_rank() + 1)):
            options = {"process_set": process_set} if process_set else {}
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
            gradient = hvd.DistributedGradientTape(tape, **options).gradient(loss, variable)
            np.testing.assert_allclose(gradient, [expected], rtol=1e-6)
            none = hvd.Compression.none
            reduce = hvd._make_allreduce_grads_fn("Some", "", "", none, False, **options)
            (gradient,) = reduce([tf.constant([hvd.rank() + 1.0])])
            np.testing.assert_allclose(gradient, [expected], rtol=1e-6)
        hvd.remove_process_set(members)
