"""Keras 3 on TensorFlow: sparse gradients, traces, TensorFlow's own errors and states."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from tf_training import assert_equal_on_all_ranks
from worlds import world_with

import perseus.tensorflow.horovod as hvd
import perseus.tensorflow.horovod.keras as hvd_keras
from perseus import _core
from perseus.elastic import known_blocks
from perseus.errors import HorovodInternalError
from perseus.feeding import BLOCK, blocks_of

v1 = tf.compat.v1
ROWS, LOCAL = 20, 8


def _embedding() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((3,), dtype="int32"),
            layers.Embedding(ROWS, 4),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _words(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    # Some rows are every rank's, some only one's.
    words = random.integers(0, ROWS // 2, (4 * LOCAL, 3)) + rank % 2
    return words.astype("int32"), random.normal(size=(4 * LOCAL, 2)).astype("float32")


def _joined() -> list[np.ndarray]:
    parts = [_words(rank) for rank in range(hvd.size())]
    starts = range(0, 4 * LOCAL, LOCAL)
    return [
        np.concatenate([part[k][i : i + LOCAL] for i in starts for part in parts]) for k in (0, 1)
    ]


def check_sparse_gradients_are_those_of_the_joined_batch() -> None:
    for dense, make in (
        (False, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        (False, lambda: keras.optimizers.Adam(0.01)),
        (True, lambda: keras.optimizers.SGD(0.1)),
    ):
        model, reference = _embedding(), _embedding()
        model.compile(hvd_keras.DistributedOptimizer(make(), sparse_as_dense=dense), "mse")
        reference.compile(make(), "mse")
        kinds: set[type] = set()
        reducer = model.optimizer._reducer
        reduce = reducer.reduce

        def watched(gradients, *rest, kinds=kinds, reduce=reduce):
            kinds.update(map(type, gradients))
            return reduce(gradients, *rest)

        reducer.reduce = watched
        model.fit(*_words(hvd.rank()), batch_size=LOCAL, epochs=2, shuffle=False, verbose=0)
        reference.fit(*_joined(), batch_size=LOCAL * hvd.size(), epochs=2, shuffle=False, verbose=0)
        assert tf.IndexedSlices in kinds
        for mine, right in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
            assert np.array_equal(mine, hvd.broadcast(mine, 0, name="same").numpy())


def check_sparse_gradients_are_accumulated() -> None:
    model, reference = _embedding(), _embedding()

    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    model.compile(hvd_keras.DistributedOptimizer(make()), "mse")
    reference.compile(make(), "mse")
    model.fit(*_words(hvd.rank()), batch_size=LOCAL, shuffle=False, verbose=0)
    reference.fit(*_joined(), batch_size=LOCAL * hvd.size(), shuffle=False, verbose=0)
    for mine, right in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


class Counting(keras.Model):
    """Counts how often its step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self.traces = 0

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def check_nothing_is_traced_more_often() -> None:
    counts = []
    for make in (
        lambda: keras.optimizers.Adam(0.01),
        lambda: hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        lambda: hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(0.01), backward_passes_per_step=2
        ),
    ):
        model = Counting()
        model.compile(make(), "mse")
        # A last batch of another size.
        x, y = np.ones((20, 4), np.float32), np.ones((20, 3), np.float32)
        for _ in range(2):
            model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        counts.append(model.traces)
    assert counts[0] == counts[1] == counts[2], counts


def check_custom_loops_in_eager_mode_and_in_functions() -> None:
    for wrap in (lambda function: function, tf.function):
        keras.utils.set_random_seed(1)
        layer, reference = keras.layers.Dense(2), keras.layers.Dense(2)
        for each in (layer, reference):
            each.build((None, 3))
        reference.set_weights(layer.get_weights())
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(layer.trainable_weights)

        @wrap
        def step(x, layer=layer, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(layer(x)))
            gradients = tape.gradient(loss, layer.trainable_weights)
            optimizer.apply_gradients(zip(gradients, layer.trainable_weights, strict=True))

        plain = keras.optimizers.SGD(0.1)
        for number in range(3):
            inputs = [
                tf.constant(np.random.default_rng([number, r]).normal(size=(2, 3)), tf.float32)
                for r in range(hvd.size())
            ]
            step(inputs[hvd.rank()])
            with tf.GradientTape() as tape:
                losses = [tf.reduce_sum(tf.square(reference(x))) for x in inputs]
                loss = tf.add_n(losses) / hvd.size()
            weights = reference.trainable_weights
            plain.apply(tape.gradient(loss, weights), weights)
        for mine, right in zip(layer.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


def check_functions_that_run_eagerly() -> None:
    """Every step has the names of the first one, under which the core sums and holds back."""
    rank, mean = hvd.rank(), (hvd.size() + 1) / 2
    weight = keras.Variable([1.0, 2.0])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    tf.config.run_functions_eagerly(True)
    try:
        with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
            for _ in range(4):
                optimizer.apply([tf.constant([1.0, 2.0]) * (rank + 1.0)], [weight])
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(weight, [1.0 - 4 * mean, 2.0 - 8 * mean])
    assert len(optimizer._reducer._reducer.residuals._reductions) == 1


def check_models_that_differ_are_an_error_in_fit() -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2 + hvd.rank())])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = np.ones((8, 4), np.float32), np.ones((8, 2 + hvd.rank()), np.float32)
    try:
        model.fit(x, y, verbose=0)
    except tf.errors.FailedPreconditionError as error:
        assert "/dense/" in str(error)
    else:
        raise AssertionError("nobody minds")
    assert float(hvd.allreduce(1.0, op=hvd.Sum, name="usable")) == hvd.size()


def check_ranks_may_have_made_other_models_before() -> None:
    """Names that Keras and TensorFlow number then differ, and operations still find each other."""
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    if rank == 1:
        _normalised().compile(keras.optimizers.SGD(), "mse")
    layer = keras.layers.Dense(2)
    layer.build((None, 3))

    def tape_gradients():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = rank * tf.add_n([tf.reduce_sum(weight) for weight in layer.trainable_weights])
        return tape.gradient(loss, layer.trainable_weights)

    for gradients in (tape_gradients(), tf.function(tape_gradients)()):
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, np.full(gradient.shape, mean))

    with tf.Graph().as_default(), v1.Session() as session:
        if rank == 1:
            v1.Variable(0.0, name="weight")
        weight = v1.Variable(1.0, name="weight")
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(rank * weight, var_list=[weight])
        session.run(v1.global_variables_initializer())
        session.run(step)
        session.run(hvd.broadcast_variables([weight], 0))
        assert session.run(weight) == 1.0 - mean

    model = _normalised()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = np.ones((8, 3), np.float32) * [[rank + 1]], np.ones((8, 2), np.float32)
    model.fit(x, y, verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_equal_on_all_ranks(model.get_weights())


def _normalised() -> keras.Model:
    layers = [keras.layers.Dense(4), hvd.SyncBatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([keras.layers.Input((3,)), *layers])


def check_states_of_variables() -> None:
    rank = hvd.rank()
    variables = [tf.Variable([1.0 + rank, 2.0]), tf.Variable(rank, dtype=tf.int64)]
    state = hvd.elastic.TensorFlowState(variables, step=rank)
    state.sync()
    assert variables[0].numpy().tolist() == [1.0, 2.0]
    assert (int(variables[1]), state.step) == (0, 0)
    variables[0].assign([5.0, 6.0])
    state.step = 3
    state.commit()
    variables[0].assign([7.0, 8.0])
    state.step = 4
    state.restore()
    assert (variables[0].numpy().tolist(), state.step) == ([5.0, 6.0], 3)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=tf.constant([1.0 + rank]))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session)
        state.sync()
        assert session.run(variable).tolist() == [1.0]
        session.run(variable.assign([9.0]))
        state.save()
        session.run(variable.assign([10.0]))
        state.restore()
        assert session.run(variable).tolist() == [9.0]


def _is_fed(table: np.ndarray) -> dict[bytes, bytes]:
    """All of a table but its second block."""
    blocks = [bytes(block) for block in blocks_of(memoryview(table.reshape(-1).view(np.uint8)))]
    return {_core.hash_blocks(block, BLOCK): block for block in blocks if block != blocks[1]}


def check_a_state_that_has_been_fed_gets_the_rest() -> None:
    rank = hvd.rank()
    table = np.arange(4 * BLOCK // 4 + 5, dtype=np.float32)
    others = [tf.bfloat16, tf.int64, tf.bool, tf.uint32]
    values = [tf.cast(tf.constant([[rank], [3]]), dtype) for dtype in others]
    for fed in ({}, _is_fed(table)):
        variables = [tf.Variable(table if rank == 0 else table * 0 - 1), *map(tf.Variable, values)]
        variables += [tf.Variable(rank + 0.5), tf.Variable(tf.zeros((0, 3)))]
        state = hvd.elastic.TensorFlowState(variables, step=rank)
        assert [len(view) for view in state.contents()] == [table.nbytes, 4, 16, 2, 8, 4, 0]
        with known_blocks.used(fed if rank > 0 else {}):
            state.sync()
        assert variables[0].numpy().tobytes() == table.tobytes()
        for variable, dtype in zip(variables[1:5], others, strict=True):
            expected = tf.cast(tf.constant([[0], [3]]), dtype)
            assert variable.numpy().tobytes() == expected.numpy().tobytes()
        assert (float(variables[5]), state.step) == (0.5, 0)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=tf.constant(table + rank))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session)
        with known_blocks.used(_is_fed(table) if rank > 0 else {}):
            state.sync()
        assert session.run(variable).tobytes() == table.tobytes()


def check_a_models_state_that_has_been_fed_gets_the_rest() -> None:
    """In Keras 3 one of the variables is Dropout's seed."""
    layers = [keras.layers.Embedding(5000, 8), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    for variable in model.variables:
        variable.assign(tf.cast(tf.ones(variable.shape) * (hvd.rank() + 2), variable.dtype))
    table = np.full((5000, 8), 2, dtype=np.float32)
    optimizer = keras.optimizers.Adam()
    state = hvd_keras.elastic.KerasState(model, optimizer, epoch=hvd.rank())
    assert len(list(state.contents())) >= 2 * len(model.trainable_weights)
    with known_blocks.used(_is_fed(table) if hvd.rank() > 0 else {}):
        state.sync()
    for variable in model.weights:
        assert (np.array(variable) == 2).all()
    assert state.epoch == 0


def check_only_a_broken_world_is_an_internal_error() -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])

    def fails(state) -> None:
        raise tf.errors.UnknownError(None, None, "of the script's own")

    try:
        hvd.elastic.run(fails)(state)
    except HorovodInternalError as error:
        raise AssertionError("it was taken for a broken world") from error
    except tf.errors.UnknownError:
        pass
    hvd.allreduce(1.0, name="everybody has seen it")  # and nobody has left before
