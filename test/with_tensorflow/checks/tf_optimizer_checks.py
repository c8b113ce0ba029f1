"""DistributedOptimizer around tf.compat.v1 optimizers: in sessions, tf.function and eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tf_training import (
    BATCH,
    COLUMNS,
    assert_equal_on_all_ranks,
    global_batch,
    initial_values,
    loss_of,
    raised,
    share,
    variables,
)
from worlds import world_with

import perseus
import perseus.tensorflow.horovod as hvd
from perseus.elastic import reset
from perseus.elastic.state import ObjectState
from perseus.errors import HorovodInternalError

v1 = tf.compat.v1
STEPS = 4


def _sgd() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9)


def _adam() -> Any:
    return v1.train.AdamOptimizer(0.01)


def _graph_variables(resource: bool = True) -> list[Any]:
    return [
        v1.get_variable(f"v{i}", initializer=value, use_resource=resource)
        for i, value in enumerate(initial_values())
    ]


def _train_in_session(
    optimizer: Callable[[], Any],
    batches: list[np.ndarray],
    resource: bool = True,
    messages: list[int] | None = None,
) -> list[np.ndarray]:
    """The parameters after a step on each batch; messages: how many each step has sent."""
    with tf.Graph().as_default(), v1.Session() as session:
        parameters = _graph_variables(resource)
        batch = v1.placeholder(tf.float32, [None, COLUMNS])
        steps = v1.train.get_or_create_global_step()
        train = optimizer().minimize(loss_of(parameters, batch), global_step=steps)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for values in batches:
            before = perseus.stats()["messages"]
            session.run(train, {batch: values})
            if messages is not None:
                messages.append(perseus.stats()["messages"] - before)
        assert session.run(steps) == len(batches)
        return list(session.run(parameters))


def _global(steps: int = STEPS) -> list[np.ndarray]:
    return [global_batch(step) for step in range(steps)]


def _shares(steps: int = STEPS) -> list[np.ndarray]:
    return [share(batch) for batch in _global(steps)]


def _assert_close(mine: list[Any], reference: list[Any]) -> None:
    for left, right in zip(mine, reference, strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=3e-5, atol=3e-6)


def check_sessions_equal_one_rank_on_the_global_batch() -> None:
    for make, resource, options in (
        (_sgd, True, {}),
        (_sgd, False, {"groups": 2}),
        (_adam, True, {"gradient_predivide_factor": 2.0, "name": "Named"}),
    ):
        mine = _train_in_session(
            lambda m=make, o=options: hvd.DistributedOptimizer(m(), **o), _shares(), resource
        )
        _assert_close(mine, _train_in_session(make, _global(), resource))
        assert_equal_on_all_ranks(mine)


@contextmanager
def _as_in_tf1() -> Iterator[None]:
    """Conditionals and variables as under tf.compat.v1.disable_v2_behavior()."""
    v1.disable_control_flow_v2()
    v1.disable_resource_variables()
    try:
        yield
    finally:
        v1.enable_control_flow_v2()
        v1.enable_resource_variables()


def check_sum_is_size_times_the_mean() -> None:
    mine = _train_in_session(
        lambda: hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1 / hvd.size()), op=hvd.Sum
        ),
        _shares(),
    )
    _assert_close(
        mine, _train_in_session(lambda: v1.train.GradientDescentOptimizer(0.1), _global())
    )


def _train_eagerly(optimizer: Any, batches: list[np.ndarray], compiled: bool) -> list[Any]:
    parameters = variables()

    def step(batch: Any) -> None:
        pairs = optimizer.compute_gradients(lambda: loss_of(parameters, batch), parameters)
        optimizer.apply_gradients(pairs)

    run = tf.function(step) if compiled else step
    for batch in batches:
        run(tf.constant(batch))
    return parameters


def check_eager_and_compiled_steps_equal_one_rank() -> None:
    for compiled in (False, True):
        mine = _train_eagerly(hvd.DistributedOptimizer(_adam()), _shares(), compiled)
        _assert_close(mine, _train_in_session(_adam, _global()))
        assert_equal_on_all_ranks(mine)


def check_monitored_training_session_with_the_hook() -> None:
    """Variables begin differently on every rank and are rank 0's after the session is made."""
    with tf.Graph().as_default():
        parameters = [
            v1.get_variable(f"v{i}", initializer=value + np.float32(hvd.rank()))
            for i, value in enumerate(initial_values())
        ]
        batch = v1.placeholder(tf.float32, [None, COLUMNS])
        steps = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(_adam())
        train = optimizer.minimize(loss_of(parameters, batch), global_step=steps)
        last = v1.train.StopAtStepHook(last_step=STEPS + 1)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), last]
        shares = _shares()
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            first = session.run(parameters)
            for values in shares:
                session.run(train, {batch: values})
            trained = session.run(parameters)
            assert not session.should_stop()
            session.run(train, {batch: shares[0]})
            assert session.should_stop()
        for value, expected in zip(first, initial_values(), strict=True):
            np.testing.assert_array_equal(value, expected)
        assert_equal_on_all_ranks(trained)
        _assert_close(trained, _train_in_session(_adam, _global()))


class _Own(hvd._LegacyOptimizer):
    """A script's optimizer, which reduces by Horovod's function; every second pass, if it helps."""

    def __init__(self, optimizer: Any, passes: int = 1) -> None:
        super().__init__(False, "Own")
        self._optimizer = optimizer
        self._reduce = hvd._make_allreduce_grads_fn(
            "Own", "", "", hvd.Compression.none, False, hvd.Average, 1.0, None
        )
        self._passes = hvd.LocalGradientAggregationHelper(
            passes, self._reduce, False, True, hvd.rank(), "optimizer_type_legacy"
        )

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, found = zip(*pairs, strict=True)
        return list(zip(self._passes.compute_gradients(gradients, found), found, strict=True))

    def apply_gradients(self, pairs: Any, global_step: Any = None, name: Any = None) -> Any:
        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        return self._passes.apply_gradients(apply, self._optimizer, pairs, global_step)


def check_optimizers_of_scripts_reduce_by_horovods_function() -> None:
    for passes in (1, 2):
        shares = [batch for batch in _shares() for _ in range(passes)]
        mine = _train_in_session(lambda passes=passes: _Own(_sgd(), passes), shares)
        _assert_close(mine, _train_in_session(_sgd, _global()))
        assert_equal_on_all_ranks(mine)
    assert isinstance(hvd.DistributedOptimizer(_sgd()), hvd._DistributedOptimizer)


def check_backward_passes_per_step() -> None:
    """Two passes on halves of a share, summed or averaged, then one step."""
    halves = [half for batch in _shares() for half in (batch[: BATCH // 2], batch[BATCH // 2 :])]
    for average in (True, False):
        rate = 0.1 if average else 0.05

        def halved(average: bool = average, rate: float = rate) -> Any:
            return hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(rate, 0.9),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )

        mine = _train_in_session(halved, halves)
        _assert_close(mine, _train_in_session(_sgd, _global()))
        assert_equal_on_all_ranks(mine)
    with _as_in_tf1():
        _assert_close(_train_in_session(halved, halves, resource=False), mine)
    assert "eager" in raised(
        ValueError, lambda: hvd.DistributedOptimizer(_sgd(), backward_passes_per_step=2)
    )


def check_passes_of_other_variables_are_counted_apart() -> None:
    """As in a GAN, whose two parts are trained in turn; each gradient is None in one of them."""
    gradient = sum(10.0 + rank for rank in range(hvd.size())) / hvd.size()
    for op, named in ((hvd.Average, True), (hvd.Average, False), (hvd.Adasum, True)):
        with tf.Graph().as_default(), v1.Session() as session:
            a, b = (v1.get_variable(name, initializer=[0.0, 0.0]) for name in "ab")
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, op=op
            )
            # Adasum takes equal steps once.
            factor = gradient if op == hvd.Adasum else 10.0 + hvd.rank()
            trains = [
                optimizer.minimize(loss, var_list=[part] if named else [a, b])
                for part, loss in ((a, tf.reduce_sum(a)), (b, tf.reduce_sum(b * factor)))
            ]
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for _ in range(4):
                for train in trains:
                    session.run(train)
            np.testing.assert_allclose(session.run(a), [-4.0] * 2)
            np.testing.assert_allclose(session.run(b), [-4 * gradient] * 2, rtol=1e-6)


def check_gradients_of_several_sets_before_they_are_applied() -> None:
    """Clipped or not, of one variable or of both, which have their own counts."""
    gradient = sum(10.0 + rank for rank in range(hvd.size())) / hvd.size()
    for core, passes in ((False, 2), (True, 1)):
        with (
            world_with(PERSEUS_ACCUMULATE_N_STEPS=2 if core else 1),
            tf.Graph().as_default(),
            v1.Session() as session,
        ):
            a, b = (v1.get_variable(name, initializer=[0.0, 0.0]) for name in "ab")
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes
            )
            loss = tf.reduce_sum(a) + tf.reduce_sum(b * (10.0 + hvd.rank()))
            sets = [[a], [b]] if core else [[a], [b], [a, b]]
            pairs = [optimizer.compute_gradients(loss, var_list=each) for each in sets]
            pairs[1] = [(tf.clip_by_value(each, -99.0, 99.0), v) for each, v in pairs[1]]
            trains = [optimizer.apply_gradients(each) for each in pairs]
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for taken in 2 * trains[:2]:
                session.run(taken)
            np.testing.assert_allclose(session.run(a), [-2.0] * 2)
            np.testing.assert_allclose(session.run(b), [-2 * gradient] * 2, rtol=1e-6)
            for taken in [trains[0], *trains[2:], *trains[2:]]:
                session.run(taken)
            np.testing.assert_allclose(session.run(a), [-2.0 if core else -4.0] * 2)


def check_a_restored_state_begins_with_the_first_pass() -> None:
    rank, size = hvd.rank(), hvd.size()
    with tf.Graph().as_default(), v1.Session() as session:
        weights = v1.get_variable("weights", initializer=np.zeros(2, np.float32))
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, op=hvd.Sum
        )
        factor = v1.placeholder(tf.float32)
        train = optimizer.minimize(tf.reduce_sum(weights * [1.0, 2.0]) * factor)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        state = hvd.elastic.TensorFlowState(session=session)
        for begin in (state.restore, state.sync):
            if rank == size - 1:
                session.run(train, {factor: 9.0})
            begin()
            before = session.run(weights)
            for number in (1.0, 2.0):
                session.run(train, {factor: number + rank})
            total = sum(3.0 + 2 * each for each in range(size))
            np.testing.assert_allclose(before - session.run(weights), [total, 2 * total])


def check_accumulation_in_the_core() -> None:
    """PERSEUS_ACCUMULATE_N_STEPS sums gradients; in between nothing is applied."""
    halves = [half for batch in _shares() for half in (batch[: BATCH // 2], batch[BATCH // 2 :])]

    def half_rate() -> Any:
        return hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.05, 0.9))

    expected = _train_in_session(_sgd, _global())
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        _assert_close(_train_in_session(half_rate, halves), expected)
        _assert_close(_train_in_session(half_rate, halves, resource=False), expected)
        with _as_in_tf1():
            _assert_close(_train_in_session(half_rate, halves, resource=False), expected)
        for compiled in (False, True):
            _assert_close(_train_eagerly(half_rate(), halves, compiled), expected)


def check_steps_with_nan_are_skipped() -> None:
    poisoned = _shares(2)
    if hvd.rank() == hvd.size() - 1:
        poisoned[0] = poisoned[0] * np.float32("nan")
    settings = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    expected = _train_in_session(_adam, _global(2)[1:])
    with world_with(**settings):
        mine = _train_in_session(lambda: hvd.DistributedOptimizer(_adam()), poisoned)
        _assert_close(mine, expected)
        for compiled in (False, True):
            optimizer = hvd.DistributedOptimizer(_adam())
            _assert_close(_train_eagerly(optimizer, poisoned, compiled), expected)


@contextmanager
def _embedding(**options: Any) -> Iterator[tuple[Any, Any, Any]]:
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("table", initializer=np.ones((5, 2), np.float32))
        rows = v1.placeholder(tf.int32, [None])
        loss = tf.reduce_sum(tf.gather(table, rows)) * (hvd.rank() + 1.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), **options)
        pairs = optimizer.compute_gradients(loss, [table])
        train = optimizer.apply_gradients(pairs)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        yield (
            lambda feed: session.run(train, {rows: feed}),
            lambda: session.run(table),
            pairs[0][0],
        )


def check_sparse_gradients() -> None:
    expected = np.ones((5, 2), np.float32)
    for rank in range(hvd.size()):
        for row in [4, rank, rank][: 2 + rank % 2]:
            expected[row] -= (rank + 1) / hvd.size()
    mine = [4, hvd.rank(), hvd.rank()][: 2 + hvd.rank() % 2]
    for options, sparse in (({}, True), ({"sparse_as_dense": True}, False)):
        with _embedding(**options) as (train, value, gradient):
            assert isinstance(gradient, tf.IndexedSlices) == sparse
            train(mine)
            np.testing.assert_allclose(value(), expected, rtol=1e-6)
    with _embedding(sparse_as_dense=True, backward_passes_per_step=2) as (train, value, _):
        train(mine)
        np.testing.assert_array_equal(value(), np.ones((5, 2)))
        train(mine)
        np.testing.assert_allclose(value(), 2 * expected - 1, rtol=1e-6)

    def summed_slices() -> None:
        with _embedding(backward_passes_per_step=2):
            pass

    assert "sparse_as_dense" in raised(ValueError, summed_slices)


def check_local_variables() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        shared = v1.get_variable("shared", initializer=np.zeros(2, np.float32))
        own = v1.get_variable("own", initializer=np.zeros(2, np.float32))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum)
        optimizer.register_local_var(own)
        train = optimizer.minimize(tf.reduce_sum(shared + own) * (hvd.rank() + 1.0))
        session.run(v1.global_variables_initializer())
        session.run(train)
        total = sum(rank + 1 for rank in range(hvd.size()))
        np.testing.assert_array_equal(session.run(shared), [-total] * 2)
        mine = -np.float32((hvd.rank() + 1) / hvd.size())
        np.testing.assert_array_equal(session.run(own), [mine] * 2)


def check_adasum_combines_steps() -> None:
    """Orthogonal steps add up, equal ones are taken once; with two steps between, as well."""
    n = hvd.size()
    for passes in (1, 2):
        with tf.Graph().as_default(), v1.Session() as session:
            value = v1.get_variable("v", initializer=np.zeros(n + 1, np.float32))
            slope = np.zeros(n + 1, np.float32)
            slope[hvd.rank()] = hvd.rank() + 1.0
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.5),
                op=hvd.Adasum,
                backward_passes_per_step=passes,
            )
            train = optimizer.minimize(tf.reduce_sum(value * slope))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for step in range(2 * passes):
                session.run(train)
                if passes == 2 and step == 0:
                    np.testing.assert_allclose(session.run(value), -0.5 * slope)
            expected = [-0.5 * (rank + 1) * 2 * passes for rank in range(n)]
            np.testing.assert_allclose(session.run(value), [*expected, 0.0], rtol=1e-5)
    for compiled in (False, True):
        variable = tf.Variable([1.0])
        adasum = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)

        def step(adasum=adasum, variable=variable) -> None:
            pairs = adasum.compute_gradients(lambda: tf.reduce_sum(3.0 * variable), [variable])
            adasum.apply_gradients(pairs)

        (tf.function(step) if compiled else step)()
        np.testing.assert_allclose(variable.numpy(), [-0.5], rtol=1e-6)


def check_steps_that_adasum_has_not_combined_end_with_their_world() -> None:
    """As where hosts have only left, when nothing is synchronized."""
    n, rank = hvd.size(), hvd.rank()
    slope = np.zeros(n, np.float32)
    slope[rank] = rank + 1.0
    for compiled in (False, True):
        variable = tf.Variable(np.arange(1.0, n + 1, dtype=np.float32))
        adasum = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum, backward_passes_per_step=2
        )

        def step(adasum=adasum, variable=variable) -> None:
            adasum.apply_gradients([(tf.constant(slope), variable)])

        step = tf.function(step) if compiled else step
        for combined in range(2):
            start = (1.0 - combined) * np.arange(1.0, n + 1, dtype=np.float32)
            np.testing.assert_array_equal(variable.numpy(), start)
            step()
            np.testing.assert_array_equal(variable.numpy(), start - 0.5 * slope)
            reset()
            np.testing.assert_array_equal(variable.numpy(), start)
            for _ in range(2):
                step()
            # Orthogonal steps add up.
            np.testing.assert_array_equal(variable.numpy(), start - np.arange(1.0, n + 1))


def check_what_is_written_between_worlds_is_no_step_of_adasum() -> None:
    """By a script, or by the restore() of a state of its own."""
    variable = tf.Variable([1.0])
    adasum = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum, backward_passes_per_step=2
    )

    def half_a_step() -> None:
        adasum.apply_gradients([(tf.constant([hvd.rank() + 1.0]), variable)])

    class Own(ObjectState):
        def restore(self) -> None:
            variable.assign([5.0])

    @hvd.elastic.run
    def train(state: Own) -> float:
        found = float(variable.numpy()[0])
        if found == 1.0:
            half_a_step()
            raise HorovodInternalError("the world is to be left")
        return found

    assert train(Own(hvd.broadcast_object, hvd.rank)) == 5.0
    half_a_step()
    hvd.shutdown()
    variable.assign([7.0])
    hvd.init()
    assert variable.numpy()[0] == 7.0


def check_adasum_compresses_steps() -> None:
    mine = 1.0 + 2.0**-12  # which float16 rounds to 1
    for compression, expected in ((hvd.Compression.none, mine), (hvd.Compression.fp16, 1.0)):
        variable = tf.Variable([0.0])
        adasum = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, compression=compression
        )
        pairs = adasum.compute_gradients(lambda v=variable: tf.reduce_sum(mine * v), [variable])
        adasum.apply_gradients(pairs)
        np.testing.assert_allclose(variable.numpy(), [-expected], rtol=1e-6)


def check_adasum_searches_steps_for_nan() -> None:
    def make() -> Any:
        return hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)

    settings = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "raise"}
    with world_with(**settings):
        variable, adasum = tf.Variable([0.0, 0.0]), make()
        slope = np.array([1.0, np.nan if hvd.rank() == 1 else 2.0], np.float32)
        pairs = adasum.compute_gradients(lambda: tf.reduce_sum(slope * variable), [variable])
        text = raised(tf.errors.InvalidArgumentError, lambda: adasum.apply_gradients(pairs))
        assert "[nancheck] NaN in the gradient of" in text, text
        assert "on rank 1" in text, text
    settings["PERSEUS_ALLREDUCE_NANCHECK_ACTION"] = "skip"
    with world_with(**settings):
        assert "op=Adasum combines: use report or raise" in raised(ValueError, make)


def check_the_wrapped_optimizers_state_is_reached() -> None:
    with tf.Graph().as_default(), v1.Session():
        parameters = _graph_variables()
        optimizer = hvd.DistributedOptimizer(_sgd())
        optimizer.minimize(loss_of(parameters, v1.placeholder(tf.float32, [None, COLUMNS])))
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(parameters[0], "momentum") is not None
        assert len(optimizer.variables()) == len(parameters)
        assert optimizer.get_name() == "DistributedMomentumOptimizer"


def check_arguments_that_do_not_fit() -> None:
    for options in (
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"groups": 0},
        {"backward_passes_per_step": 0},
    ):
        raised(ValueError, lambda o=options: hvd.DistributedOptimizer(_sgd(), **o))
    assert "expected an optimizer" in raised(ValueError, lambda: hvd.DistributedOptimizer(object()))


def check_a_nan_raises_where_that_is_wished() -> None:
    poisoned = _shares(1)
    if hvd.rank() == hvd.size() - 1:
        poisoned[0] = poisoned[0] * np.float32("nan")
    settings = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "raise"}
    with world_with(**settings):
        for run in (
            lambda: _train_in_session(lambda: hvd.DistributedOptimizer(_sgd()), poisoned),
            lambda: _train_eagerly(hvd.DistributedOptimizer(_sgd()), poisoned, True),
        ):
            message = raised(tf.errors.OpError, run)
            assert "NaN" in message
            assert f"rank {hvd.size() - 1}" in message


def check_learnt_order_and_speed_checks_change_nothing() -> None:
    batches = [batch for _ in range(12) for batch in _shares()]
    messages: list[int] = []

    def train(messages: list[int] | None = None) -> list[np.ndarray]:
        return _train_in_session(
            lambda: hvd.DistributedOptimizer(_adam()), batches, messages=messages
        )

    expected = train()
    with world_with(PERSEUS_OFFLINE_NEG=1):
        for value, other in zip(train(messages), expected, strict=True):
            np.testing.assert_array_equal(value, other)
    assert [0, 0, 0] in [messages[i : i + 3] for i in range(len(messages))], messages
    with world_with(PERSEUS_PERF_CHECK_N_STEPS=4):
        for value, other in zip(train(), expected, strict=True):
            np.testing.assert_array_equal(value, other)
