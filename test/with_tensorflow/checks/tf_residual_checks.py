"""Checkpoints have what lossy codecs hold back of tapes' and tf.compat.v1 optimizers' gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import gradient_settings as settings
import numpy as np
import tensorflow as tf
from tf_training import raised

import perseus.tensorflow.horovod as hvd
from perseus import control
from perseus.gradients import scopes

v1 = tf.compat.v1
CODECS = (hvd.Compression.topk(0.1), hvd.Compression.int8)


def _new(name: str = "model") -> hvd.GradientResiduals:
    scopes._taken.clear()  # names begin anew, as in another process
    return hvd.GradientResiduals(name)


def _held(residuals) -> dict[str, bytes]:
    return {name: bytes(data) for name, (_, data) in residuals.residuals().items()}


class _Taped:
    """Variables and what trains them by a tape."""

    def __init__(self, compression, compiled: bool, name: str = "model") -> None:
        self.residuals = _new(name)
        self.variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
        self.optimizer = v1.train.MomentumOptimizer(0.5, 0.5)
        self.checkpoint = tf.train.Checkpoint(
            variables=self.variables, optimizer=self.optimizer, residuals=self.residuals
        )
        self._compression = compression
        self._run = tf.function(self._step) if compiled else self._step

    def _step(self, *slopes) -> None:
        with tf.GradientTape() as tape:
            products = zip(slopes, self.variables, strict=True)
            loss = tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])
        tape = hvd.DistributedGradientTape(
            tape, compression=self._compression, residuals=self.residuals
        )
        gradients = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def train(self, steps) -> tuple[list[bytes], dict[str, bytes]]:
        for step in steps:
            self._run(*map(tf.constant, settings.normal(hvd.rank(), step)))
        return [variable.numpy().tobytes() for variable in self.variables], _held(self.residuals)


def check_a_tape_goes_on_with_what_it_held() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        for number, compression in enumerate(CODECS):
            for compiled in (True, False):
                first = _Taped(compression, compiled)
                _, held = first.train(range(3))
                assert len(held) == 2 and any(any(data) for data in held.values())
                path = first.checkpoint.save(str(Path(folder) / f"{number}{compiled}"))
                expected = first.train(range(3, 6))
                assert expected[1] != held
                for again in (first, _Taped(compression, compiled)):
                    again.checkpoint.restore(path)
                    assert _held(again.residuals) == held
                    assert again.train(range(3, 6)) == expected


def check_an_optimizer_of_a_session_goes_on_with_what_it_held() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as folder:
        for number, compression in enumerate(CODECS):
            path = str(Path(folder) / str(number))
            with _session(compression) as first:
                held = first(range(3))[1]
                assert len(held) == 2 and any(any(data) for data in held.values())
                first.saver.save(v1.get_default_session(), path)
                expected = first(range(3, 6))
                first.saver.restore(v1.get_default_session(), path)
                assert first(range(3, 6)) == expected
            with _session(compression) as again:
                again.saver.restore(v1.get_default_session(), path)
                assert again(range(3, 6)) == expected


class _session:  # noqa: N801 - used as a function
    """A session of a graph, and a function that trains in it."""

    def __init__(self, compression) -> None:
        self._compression = compression

    def __enter__(self) -> _session:
        self.residuals = _new()
        self._graph = tf.Graph().as_default()
        self._graph.__enter__()
        self.variables = [v1.Variable(np.zeros(s, "float32")) for s in settings.SHAPES]
        self.slopes = [v1.placeholder(tf.float32, shape) for shape in settings.SHAPES]
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(0.5, 0.5),
            compression=self._compression,
            residuals=self.residuals,
        )
        products = zip(self.slopes, self.variables, strict=True)
        loss = tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])
        self.step = optimizer.minimize(loss)
        self.saver = v1.train.Saver([*v1.global_variables(), self.residuals.saveable()])
        self.session = v1.Session()
        self.session.__enter__()
        self.session.run(v1.global_variables_initializer())
        return self

    def __exit__(self, *exception) -> None:
        self.session.__exit__(*exception)
        self._graph.__exit__(*exception)
        self.session.close()

    def __call__(self, steps) -> tuple[list[bytes], dict[str, bytes]]:
        for step in steps:
            given = dict(zip(self.slopes, settings.normal(hvd.rank(), step), strict=True))
            self.session.run(self.step, given)
        values = [value.tobytes() for value in self.session.run(self.variables)]
        return values, _held(self.residuals)


def check_elastic_states_keep_what_each_rank_held() -> None:
    """From the last commit on the next world trains as if nothing had happened."""
    with settings.apart():
        for number, compression in enumerate(CODECS):
            for of_model in (False, True):
                name = f"model_{number}_{of_model}"  # graphs of others keep their names
                expected = _Taped(compression, True, name).train(range(6))
                taped = _Taped(compression, not of_model, name)
                taped.train([0])
                weights, held = _trained(taped, _state(taped, of_model))
                assert weights == expected[0], name
                assert sorted(held) == sorted(expected[1])
                assert all(held[key] == expected[1][key] for key in held), name


def _state(taped: _Taped, of_model: bool):
    slots, values = taped.optimizer.variables(), {"step": 1, "held": taped.residuals}
    assert len(slots) == len(taped.variables)
    if not of_model:
        return hvd.elastic.TensorFlowState([*taped.variables, *slots], **values)
    model = SimpleNamespace(built=True, weights=taped.variables, trainable_weights=taped.variables)
    optimizer = SimpleNamespace(build=None, built=True, variables=slots)
    return hvd.elastic.TensorFlowKerasState(model, optimizer, **values)


def _trained(taped: _Taped, state) -> tuple[list[bytes], dict[str, bytes]]:
    """After 6 steps; rank 0 breaks the world after the fifth, the last commit is the third."""
    worlds, held = [], {}

    @hvd.elastic.run
    def train(state):
        worlds.append(state.step)
        assert _held(taped.residuals) == held or len(worlds) == 1
        while state.step < 6:
            found = taped.train([state.step])
            state.step += 1
            if state.step == 3:
                state.commit()
                held.update(found[1])
            if state.step == 5 and len(worlds) == 1 and hvd.rank() == 0:
                assert found[1] != held
                raise hvd.elastic.HorovodInternalError("injected")
        return found

    outcome = train(state)
    assert worlds == [1, 3]
    return outcome


def check_only_the_rank_that_saved_takes_it() -> None:
    with settings.apart(), tempfile.TemporaryDirectory() as mine:
        root = Path(control.gather_lines(mine, "folder")[0]) / "root"
        taped = _Taped(CODECS[0], True)
        _, held = taped.train(range(2))
        if hvd.rank() == 0:
            taped.checkpoint.write(str(root))
        control.gather_lines("", "saved")
        taped.checkpoint.read(str(root))
        assert _held(taped.residuals) == (held if hvd.rank() == 0 else {})
        control.gather_lines("", "read")


def check_residuals_that_cannot_be() -> None:
    residuals = _new()
    optimizer = v1.train.GradientDescentOptimizer(1.0)
    hvd.DistributedOptimizer(optimizer, residuals=residuals)
    text = raised(
        ValueError, lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Sum, residuals=residuals)
    )
    assert "make a GradientResiduals for each model" in text
    for other in ({"op": hvd.Adasum}, {"optimizer": tf.keras.optimizers.SGD(0.1)}):
        arguments = {"optimizer": optimizer, "residuals": _new(), **other}
        text = raised(ValueError, lambda given=arguments: hvd.DistributedOptimizer(**given))
        assert "residuals= is " in text
    for string, words in ((b"", "not what"), (b"{}\n.", "not what"), (b"[1\n", "not what")):
        assert words in raised(ValueError, lambda given=string: residuals.deserialize(given))
    whole = residuals.serialize()
    assert "missing" in raised(ValueError, lambda: residuals.deserialize(whole[:-1]))


class _Derived(v1.train.GradientDescentOptimizer):
    pass


def _in_session(make, passes: int = 1, resource: bool = True):
    """A training in a session, which is fed with the rate."""

    def train(given: list[settings.Arrays]) -> list[settings.Arrays]:
        with tf.Graph().as_default(), v1.Session() as session:
            rate = v1.placeholder(tf.float32, [])
            slopes = [v1.placeholder(tf.float32, shape) for shape in settings.SHAPES]
            variables = [
                v1.Variable(np.zeros(s, "float32"), use_resource=resource) for s in settings.SHAPES
            ]
            optimizer = hvd.DistributedOptimizer(make(rate), backward_passes_per_step=passes)
            products = zip(slopes, variables, strict=True)
            loss = tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])
            step = optimizer.minimize(loss)
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            results = []
            for number, arrays in enumerate(given):
                settings.flush_before_last(number)
                fed = {rate: settings.RATES[number]}
                for _ in range(passes - 1):
                    session.run(step, {**fed, **{slope: np.ones(slope.shape) for slope in slopes}})
                rest = [array - (passes - 1) for array in arrays]
                session.run(step, {**fed, **dict(zip(slopes, rest, strict=True))})
                results.append(session.run(variables))
            return results

    return train


def with_variable_rate(make, compiled: bool, by_tape: bool = False, xla: bool = False):
    """A training eagerly or in a function, the rate of which is a variable."""

    def train(given: list[settings.Arrays]) -> list[settings.Arrays]:
        rate = tf.Variable(7.0)
        variables = [tf.Variable(np.zeros(shape, "float32")) for shape in settings.SHAPES]
        optimizer = make(rate) if by_tape else hvd.DistributedOptimizer(make(rate))

        def step(*slopes) -> None:
            def loss():
                products = zip(slopes, variables, strict=True)
                return tf.add_n([tf.reduce_sum(slope * variable) for slope, variable in products])

            if not by_tape:
                optimizer.minimize(loss, var_list=variables)
                return
            with tf.GradientTape() as tape:
                value = loss()
            gradients = hvd.DistributedGradientTape(tape).gradient(value, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        run = tf.function(step, autograph=False, jit_compile=xla) if compiled else step
        results = []
        for number, arrays in enumerate(given):
            settings.flush_before_last(number)
            rate.assign(settings.RATES[number])
            run(*map(tf.constant, arrays))
            results.append([variable.numpy() for variable in variables])
        return results

    return train


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """By the rate of its own step, whatever the rate is when it arrives."""
    sgd = v1.train.GradientDescentOptimizer

    def momentum(rate):
        return v1.train.MomentumOptimizer(rate, 0.0)

    settings.learning_rates(_in_session(sgd))
    settings.learning_rates(_in_session(momentum, resource=False))
    settings.learning_rates(_in_session(momentum, passes=2))
    for compiled in (False, True):
        settings.learning_rates(with_variable_rate(sgd, compiled))


def check_other_steps_tell_no_rates() -> None:
    """Those of derived optimizers, of rates that a function gives, and with a tape."""
    settings.learning_rates(_in_session(_Derived), known=False)

    def by_function(rate):
        return v1.train.GradientDescentOptimizer(lambda: rate)

    settings.learning_rates(with_variable_rate(by_function, False), known=False)
    sgd = v1.train.GradientDescentOptimizer
    settings.learning_rates(with_variable_rate(sgd, True, by_tape=True), known=False)
