"""Compression.rotate: each step averages an N-th of the weights, one step late."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_replicas import (
    RATE,
    SHAPES,
    WAYS,
    Simulation,
    Training,
    assert_same_bits,
    equal_everywhere,
    slope,
)
from mx_training import BATCH, backward, global_batch, model, raised, share, values_of
from mx_values import BFLOAT16, as_array, assert_equal, usable

import perseus
import perseus.mxnet as hvd
from perseus import control
from perseus.gradients.plan import Plan
from perseus.mxnet.rotation import Weight
from perseus.mxnet.weight_turns import WeightTurns

COMPRESSIONS: dict[str, Any] = {
    "trainer": hvd.Compression.rotate,
    "groups": hvd.Compression.rotate,
    "by_hand": hvd.Compression.rotate,
    "store": lambda n=None: {"type": "rotate", "n": n},
    "pushpull": lambda n=None: {"type": "rotate", "n": n},
}


def check_weights_are_those_of_a_simulation() -> None:
    """Bit by bit, by the setting and by compression, for less and more parts than rows."""
    for parts in (2, 3, 8):
        steps = 2 * parts + 1
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=parts):
            for way in WAYS:
                _follows(Training(way), parts, steps)
        with settings.apart():
            for way, rotate in COMPRESSIONS.items():
                _follows(Training(way, rotate(parts)), parts, steps)


def check_the_number_may_come_from_the_setting() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=4):
        for way, rotate in COMPRESSIONS.items():
            _follows(Training(way, rotate()), 4, 6)


def _follows(training: Training, parts: int, steps: int) -> None:
    simulation = Simulation(parts, training.way)
    for step in range(steps):
        training.step()
        simulation.step()
        assert_same_bits(training.values(), simulation.mine(), (training.way, parts, step))
    assert not training.equal_everywhere()


def check_other_compressions_outdo_the_setting() -> None:
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=4):
        for way, none in (
            ("trainer", hvd.Compression.none),
            ("store", {"type": "none"}),
            ("trainer", hvd.Compression.rotate(1)),
        ):
            training = Training(way, none)
            for _ in range(5):
                training.step()
                assert training.equal_everywhere(), way


def check_every_dtype_is_averaged() -> None:
    for dtype in ("float64", "float16"):
        for way in WAYS:
            if (dtype, way) == ("float16", "pushpull"):
                continue
            with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
                training, simulation = Training(way, dtype=dtype), Simulation(2, way, dtype=dtype)
                for _ in range(6):
                    training.step()
                    simulation.step()
                    assert_same_bits(training.values(), simulation.mine(), (way, dtype))
                hvd.synchronize_parameters()
                assert training.equal_everywhere()
                assert training.values()[0].dtype == dtype


def check_bfloat16_is_averaged() -> None:
    """MXNet's optimizers do not update it."""
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        numbers = np.arange(15).reshape(5, 3) + hvd.rank() * 2.0
        array = as_array(numbers, BFLOAT16)
        turns = WeightTurns(Plan(), "arrays", lambda _: Weight(array))
        for _ in range(2):
            turns.take([0])
        turns.finish()
        expected = np.arange(15).reshape(5, 3) + hvd.size() - 1.0
        assert_equal(array, expected)
        array[:] = as_array(numbers, BFLOAT16)
        hvd.synchronize_parameters()
        assert_equal(array, expected)


def check_float64_keeps_its_digits() -> None:
    start = np.full(SHAPES["w"], 1 / 3)
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = Training("trainer", dtype="float64")
        training.fill(1 / 3)
        for _ in range(2):
            training.step()
        hvd.synchronize_parameters()
        slopes = [slope("w", rank, step) for rank in range(hvd.size()) for step in range(2)]
        exact = start - RATE * 2 * np.mean(slopes, axis=0, dtype=np.float64)
        assert np.abs(training.values()[0] - exact).max() < 1e-15


def check_float16_weights_that_optimizers_keep_in_float32() -> None:
    """Of each kind of state: with and without momentum, and with the base class's layout."""
    for way in ("trainer", "optimizer", "store"):
        for momentum in (0.0, 0.5):
            with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
                options = {"multi_precision": True, "momentum": momentum}
                training = Training(way, dtype="float16", **options)
                simulation = Simulation(2, way, dtype="float16", wide="float32")
                for step in range(7):
                    training.step()
                    simulation.step()
                    if not momentum:
                        assert_same_bits(training.values(), simulation.mine(), (way, step))
                hvd.synchronize_parameters()
                assert training.equal_everywhere()
                if not momentum:
                    assert_same_bits(training.values(), simulation.corrected_mean(), way)
                training.taken = 0
                training.step()
                assert not training.equal_everywhere()
                hvd.synchronize_parameters()
                assert training.equal_everywhere()
    _another_layout()


def _another_layout() -> None:
    """Adam has the base class's; its first step is the rate times the gradient's sign."""
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        parameter = mx.gluon.Parameter("p", shape=(6, 5), dtype="float16")
        parameter.initialize(mx.init.Zero())
        options = {"learning_rate": 0.25, "multi_precision": True}
        trainer = hvd.DistributedTrainer([parameter], "adam", options)
        for _ in range(4):
            with mx.autograd.record():
                loss = (parameter.data() * (hvd.rank() + 1.0 if hvd.rank() else -1.0)).sum()
            loss.backward()
            trainer.step(1)
        hvd.synchronize_parameters()
        master, _ = trainer._updaters[0].states[0]
        assert equal_everywhere([parameter.data().asnumpy(), master.asnumpy()])
        assert_same_bits([master.astype("float16").asnumpy()], [parameter.data().asnumpy()])


def check_synchronized_weights_have_the_same_bits_everywhere() -> None:
    """Also what a pull gives, and what the next step begins with."""
    for way in WAYS:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3):
            training, simulation = Training(way), Simulation(3, way)
            for _ in range(4):
                training.step()
                simulation.step()
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
            assert_same_bits(training.values(), simulation.corrected_mean(), way)
            assert training.equal_everywhere()
            if way == "store":
                outs = [mx.nd.zeros(shape) for shape in SHAPES.values()]
                training.trainer._kvstore.pull(list(range(len(outs))), outs)
                assert_same_bits([out.asnumpy() for out in outs], training.values())
            before = training.values()
            training.step()
            after = [old - RATE * g for old, g in zip(before, _slopes(4), strict=True)]
            assert_same_bits(training.values(), after, way)
    Training("trainer", hvd.Compression.fp16).step()
    hvd.synchronize_parameters()  # nothing to do


def _slopes(step: int) -> list[np.ndarray]:
    return [slope(name, hvd.rank(), step) for name in SHAPES]


def check_broadcasts_and_loaded_states_leave_nothing_to_correct() -> None:
    def broadcast(training: Training) -> None:
        values = {p.name: p.data() for p in training.parameters}
        hvd.broadcast_parameters(values, root_rank=hvd.size() - 1)
        assert training.equal_everywhere()

    def load(training: Training) -> None:
        with tempfile.TemporaryDirectory() as folder:
            training.trainer.save_states(f"{folder}/states")
            training.trainer.load_states(f"{folder}/states")
        training.fill(2.0)

    for change, ways in ((broadcast, ("trainer", "optimizer", "pushpull")), (load, ("trainer",))):
        for way in ways:
            with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
                training = Training(way)
                for _ in range(3):
                    training.step()
                change(training)
                before = training.values()
                training.step()
                own = [old - RATE * g for old, g in zip(before, _slopes(3), strict=True)]
                assert_same_bits(training.values(), own, (change, way))


def check_ranks_of_one_host_stay_equal() -> None:
    """Nothing is left out inside a host: gradients are averaged there."""
    for way, rotate in COMPRESSIONS.items():
        rotating = Training(way, rotate(4))
        plain = Training("trainer", hvd.Compression.none)
        for _ in range(5):
            rotating.step()
            plain.step()
            assert_same_bits(rotating.values(), plain.values(), way)


def check_only_an_nth_of_the_weights_travels() -> None:
    count, parts, steps = 400_000, 8, 40
    with settings.apart():
        parameter = mx.gluon.Parameter("p", shape=(4000, 100))
        parameter.initialize(mx.init.Zero())
        rotate = hvd.Compression.rotate(parts)
        trainer = hvd.DistributedTrainer([parameter], "sgd", compression=rotate)
        before = perseus.stats()["shm_bytes_sent"]
        for _ in range(steps):
            with mx.autograd.record():
                loss = parameter.data().sum()
            loss.backward()
            trainer.step(1)
        mx.nd.waitall()
        sent = (perseus.stats()["shm_bytes_sent"] - before) / steps
    exact = 2 * (hvd.size() - 1) / hvd.size() * 4 * count
    assert abs(sent - exact / parts) < 0.1 * exact / parts, (sent, exact)


def check_training_ends_where_exact_training_ends() -> None:
    """With momentum, at a rate that is stable for the batch of one rank."""
    options, losses = {"learning_rate": 0.02, "momentum": 0.9}, []
    for compression in (hvd.Compression.none, hvd.Compression.rotate(8)):
        with settings.apart():
            net = model()
            parameters = net.collect_params()
            trainer = hvd.DistributedTrainer(parameters, "sgd", options, compression=compression)
            start = _loss(net)
            for step in range(200):
                backward(net, share(global_batch(step)))
                trainer.step(BATCH)
            hvd.synchronize_parameters()
            assert equal_everywhere(values_of(net))
            losses.append(_loss(net))
    exact, rotating = losses
    assert exact < start / 50 and rotating < 1.5 * exact, (start, losses)


def _loss(net: mx.gluon.Block) -> float:
    rows = mx.nd.array(np.concatenate([global_batch(1000 + i) for i in range(20)]))
    return float(((net(rows)[:, 0] - rows[:, 0]) ** 2).mean().asscalar())


def check_steps_that_are_not_applied_take_no_turns() -> None:
    """PERSEUS_ACCUMULATE_N_STEPS: every third step is one, with the sum of three gradients."""
    for way in ("trainer", "optimizer", "store"):
        with settings.apart(PERSEUS_ACCUMULATE_N_STEPS=3, PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            training, simulation = Training(way), _OfSums(2, way)
            for step in range(12):
                training.step()
                if step % 3 == 2:
                    simulation.step()
                assert_same_bits(training.values(), simulation.mine(), (way, step))


class _OfSums(Simulation):
    """Each of its steps has the gradients of three."""

    def gradient(self, name: str, rank: int) -> np.ndarray:
        return sum(slope(name, rank, 3 * self.taken + i) for i in range(3))


def check_a_nan_skips_the_step_and_its_turn() -> None:
    """In the last gradient, so that a store has updated others; all ranks decide alike."""
    skip = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    for way in ("trainer", "store"):
        with (
            settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2, **skip),
            settings.captured_stderr(),
        ):
            training = Training(way)
            for step in range(7):
                before = training.values()
                _with_nan(training, step == 3)
                if step == 3:
                    assert_same_bits(training.values(), before, way)
                assert all(np.isfinite(value).all() for value in training.values())
            hvd.synchronize_parameters()
            assert training.equal_everywhere()
            # The mean over ranks is that of training without the step that was skipped.
            for name, value in zip(SHAPES, training.values(), strict=True):
                total = [
                    slope(name, rank, step)
                    for rank in range(hvd.size())
                    for step in range(7)
                    if step != 3
                ]
                assert np.abs(value + RATE * np.sum(total, axis=0) / hvd.size()).max() < 1e-6, way


def _with_nan(training: Training, has_nan: bool) -> None:
    given = training.given
    if has_nan and hvd.rank() == hvd.size() - 1:
        bad = given()
        bad[-1][3] = np.nan
        training.given = lambda: bad
    training.step()
    training.given = given


class _Overflow:
    """Gluon's loss scaler, of which the trainer asks whether to skip the update."""

    def __init__(self, overflows: bool) -> None:
        self.overflows = overflows

    def has_overflow(self, _: object) -> bool:
        return self.overflows


def check_a_rank_that_does_not_update_takes_its_turn() -> None:
    """Its loss scaler skips step 2, and gluon refuses gradients that are not new in step 4."""
    for way in ("trainer", "by_hand"):
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            training, simulation = Training(way), Simulation(2, way)
            last = hvd.size() - 1
            for step in range(8):
                training.trainer._amp_loss_scaler = _Overflow(step == 2 and hvd.rank() == last)
                if step == 4 and hvd.rank() == last:
                    training.backward = lambda: None
                    assert "not been updated" in raised(UserWarning, training.step)
                    del training.backward
                    training.taken += 1
                else:
                    training.step()
                simulation.step(skipping=[last] if step in (2, 4) else [])
                assert_same_bits(training.values(), simulation.mine(), (way, step))


def check_no_step_waits_for_other_ranks() -> None:
    """Rank 0 takes three steps before the others begin with theirs."""
    for way in WAYS:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            training, simulation = Training(way), Simulation(2, way)
            for turn in (hvd.rank() == 0, hvd.rank() != 0):
                for _ in range(3 if turn else 0):
                    training.step()
                control.barrier()
            for _ in range(3):
                simulation.step()
            assert_same_bits(training.values(), simulation.mine(), way)


def check_the_first_step_can_be_made_equal() -> None:
    for way in WAYS:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            training, simulation = Training(way), Simulation(2, way)
            training.step()
            simulation.step()
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
            assert_same_bits(training.values(), simulation.corrected_mean(), way)


def check_weights_in_a_layout_of_onednn_are_averaged() -> None:
    """Inference leaves weights of convolutions so."""
    images = mx.nd.ones((2, 16, 9, 9))
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Conv2D(32, 3, in_channels=16, use_bias=False))
        net.add(mx.gluon.nn.Conv2D(16, 3, in_channels=32, use_bias=False))
        net.initialize()
        weights = [parameter.data() for parameter in net.collect_params().values()]
        numbers = [np.arange(w.size).reshape(w.shape) % 31 - 15.0 for w in weights]
        for weight, number in zip(weights, numbers, strict=True):
            weight[:] = number + hvd.rank() * 2
        turns = WeightTurns(Plan(), "arrays", lambda key: Weight(weights[key]))
        for _ in range(2):
            net(images).wait_to_read()
            turns.take([0, 1])
        net(images).wait_to_read()
        turns.finish()
        for weight, number in zip(weights, numbers, strict=True):
            assert_equal(weight, number + hvd.size() - 1)


def check_what_is_under_way_at_the_end_of_a_world_is_no_error() -> None:
    """The others have not come to this turn, so that it fails."""
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        array = mx.nd.full((4, 3), 5.0)
        turns = WeightTurns(Plan(), "arrays", lambda _: Weight(array))
        if hvd.rank() == 0:
            turns.take([0])
    mx.nd.waitall()
    assert_equal(array, np.full((4, 3), 5.0))


def check_a_trainer_outlives_worlds_with_other_settings() -> None:
    for way in WAYS:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            training = Training(way)
            for _ in range(3):
                training.step()
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
        with settings.apart(PERSEUS_ALLREDUCE_DTYPE=1):
            for _ in range(3):
                training.step()
                assert training.equal_everywhere()
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3):
            for _ in range(3):
                training.step()
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
            assert training.equal_everywhere()
            for name, value in zip(SHAPES, training.values(), strict=True):
                total = [slope(name, rank, i) for rank in range(hvd.size()) for i in range(9)]
                assert np.abs(value + RATE * np.sum(total, axis=0) / hvd.size()).max() < 1e-6, way


def check_ranks_may_collect_trainers_at_different_times() -> None:
    """Gluon's trainers refer to themselves: one rank still has what another has not."""
    gc.disable()
    try:
        for way in WAYS:
            with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
                for _ in range(2):
                    Training(way).step()
                    if hvd.rank() == 0:
                        gc.collect()
                hvd.synchronize_parameters()
            with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
                _follows(Training(way), 2, 4)
                hvd.synchronize_parameters()
    finally:
        gc.enable()


def check_parameters_that_differ_are_not_compared() -> None:
    both = {"PERSEUS_PARAMETER_CHECK_N_STEPS": 5, "PERSEUS_DOWNSAMPLE_N_ELEMENTS": 2}
    with settings.apart(**both):
        for make in (lambda: Training("trainer"), lambda: Training("optimizer"), hvd.create):
            assert "cannot compare" in raised(ValueError, make)
        Training("trainer", hvd.Compression.fp16).step()
    with settings.apart(PERSEUS_PARAMETER_CHECK_N_STEPS=5):
        store = hvd.create()
        rotate = {"type": "rotate", "n": 2}
        assert "cannot compare" in raised(
            ValueError, lambda: store.set_gradient_compression(rotate)
        )


def check_sparse_gradients_travel_whole() -> None:
    """Their weights stay equal, while the others take turns."""
    for kvstore in (None, "dist_sync_perseus"):
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            embedding = mx.gluon.nn.Embedding(20, 3, sparse_grad=True)
            dense = mx.gluon.nn.Dense(4, in_units=3)
            parameters = []
            for block in (embedding, dense):
                block.initialize(mx.init.One())
                parameters += block.collect_params().values()
            options = {"learning_rate": 1.0}
            if kvstore is None:
                trainer = hvd.DistributedTrainer(parameters, "sgd", options)
            else:
                trainer = mx.gluon.Trainer(parameters, "sgd", options, kvstore=kvstore)
            for _ in range(3):
                with mx.autograd.record():
                    loss = embedding(mx.nd.array([hvd.rank(), 10])).sum()
                    loss = loss + dense(mx.nd.ones((1, 3))).sum() * hvd.rank()
                loss.backward()
                trainer.step(1 if kvstore is None else hvd.size())
            expected = np.ones((20, 3), np.float32)
            expected[10] -= 3
            expected[: hvd.size()] -= 3 / hvd.size()
            assert_same_bits([embedding.weight.data().asnumpy()], [expected], kvstore)
            assert not equal_everywhere([dense.weight.data().asnumpy()])
            hvd.synchronize_parameters()
            assert equal_everywhere([dense.weight.data().asnumpy()])


def check_two_models_with_the_same_names_do_not_mix() -> None:
    for way in WAYS:
        if way == "optimizer":
            continue  # which must not work at the same time
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            first, second, simulation = Training(way), Training(way), Simulation(2, way)
            if way != "store":
                second.fill(64.0)
            for _ in range(5):
                for training in (first, second):
                    training.step()
                simulation.step()
            assert_same_bits(first.values(), simulation.mine(), way)
            start = 0 if way == "store" else 64
            assert_same_bits([value - start for value in second.values()], simulation.mine(), way)
            hvd.synchronize_parameters()
            assert first.equal_everywhere() and second.equal_everywhere()


def check_scalars_and_empty_arrays() -> None:
    """They exist with NumPy's shapes only, and gluon cannot initialise them."""
    mx.npx.set_np()
    try:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
            scalar = mx.np.array(hvd.rank() + 1.0)
            arrays = [mx.np.zeros((0, 3)), scalar, mx.np.zeros((3, 0))]
            turns = WeightTurns(Plan(), "arrays", lambda key: Weight(arrays[key]))
            for keys in ([0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1]):
                turns.take(keys)
            turns.finish()
            mean = (hvd.size() + 1) / 2
            assert scalar.item() == mean
            scalar += hvd.rank() * 2
            assert not equal_everywhere([scalar.asnumpy()])
            hvd.synchronize_parameters()
            assert scalar.item() == mean + hvd.size() - 1
    finally:
        mx.npx.reset_np()
    usable()
