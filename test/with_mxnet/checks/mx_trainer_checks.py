"""DistributedTrainer: training on many ranks is training on one."""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np
from mx_training import (
    BATCH,
    SGD,
    assert_close,
    assert_equal_on_all_ranks,
    backward,
    global_batch,
    gradients_of,
    model,
    on_one_rank,
    raised,
    share,
    values_of,
)
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from worlds import world_with

import perseus
import perseus.mxnet as hvd
from perseus.report.trace import read


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

    compress, decompress = _Halved.compress, staticmethod(lambda tensor, ctx: tensor * 2)


def check_a_trainer_equals_one_rank_on_the_global_batch() -> None:
    for hybrid, options in (
        (False, {}),
        (True, {}),
        (False, {"num_groups": 2}),
        (False, {"num_groups": 9, "prefix": "some."}),
        (True, {"gradient_predivide_factor": 2.0}),
        (False, {"compression": hvd.Compression.none}),
        (False, {"compression": hvd.Compression.int8}),  # one host: codecs do not act there
        (False, {"compression": _Halved}),
        (False, {"compression": _HalvedToo}),
    ):
        net = model()
        net.hybridize(active=hybrid, static_alloc=hybrid)
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, **options)
        for step in range(4):
            backward(net, share(global_batch(step)))
            trainer.step(BATCH)
        assert_close(values_of(net), on_one_rank(4))
        assert_equal_on_all_ranks(values_of(net))


def check_two_trainers_at_the_same_time() -> None:
    nets = [model(seed) for seed in (7, 8)]
    trainers = [
        hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, prefix=f"{place}.")
        for place, net in enumerate(nets)
    ]
    for step in range(4):
        for net in nets:
            backward(net, share(global_batch(step)))
        for trainer in trainers:
            trainer.step(BATCH)
    assert_close(values_of(nets[0]), on_one_rank(4))
    for net in nets:
        assert_equal_on_all_ranks(values_of(net))


def check_a_trainer_goes_on_from_its_states() -> None:
    net = model()
    first = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    for step in range(2):
        backward(net, share(global_batch(step)))
        first.step(BATCH)
    with tempfile.NamedTemporaryFile() as file:
        first.save_states(file.name)
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 7.0})
        trainer.load_states(file.name)
    for step in range(2, 4):
        backward(net, share(global_batch(step)))
        trainer.step(BATCH)
    assert_close(values_of(net), on_one_rank(4))


def check_gradients_are_means_between_allreduce_and_update() -> None:
    net, reference = model(), model()
    trainer = hvd.DistributedTrainer(list(net.collect_params().values())[::-1], "adam")
    backward(net, share(global_batch(0)))
    backward(reference, global_batch(0))
    trainer.allreduce_grads()
    assert_close(gradients_of(net), [g / hvd.size() for g in gradients_of(reference)])
    before = values_of(net)
    trainer.update(BATCH)
    assert all((new != old).any() for new, old in zip(values_of(net), before, strict=True))
    assert_equal_on_all_ranks(values_of(net))


def check_dtypes_in_a_group() -> None:
    layers = []
    for dtype in ("float16", "float32", "float64"):
        layers.append(gluon.Parameter(f"of_{dtype}", shape=(7,), dtype=dtype))
        layers[-1].initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(layers, "sgd", {"learning_rate": 2.0}, num_groups=2)
    rows = mx.nd.arange(7) + hvd.rank()
    with autograd.record():
        loss = mx.nd.add_n(*((p.data().astype("float32") * rows).sum() for p in layers))
    loss.backward()
    trainer.step(4)
    for parameter in layers:
        expected = -0.5 * (np.arange(7) + (hvd.size() - 1) / 2)
        assert parameter.data().asnumpy().tolist() == expected.tolist()


def check_a_parameter_that_is_given_twice() -> None:
    shared = gluon.Parameter("shared", shape=(1000,))
    shared.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer([shared, shared], "sgd")
    with autograd.record():
        loss = (shared.data() * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.allreduce_grads()
    assert set(shared.grad().asnumpy().tolist()) == {(hvd.size() + 1) / 2}


def check_ranks_that_use_different_layers_stay_equal() -> None:
    """Of the two first, each rank uses one; the last is used by none."""
    layers = [gluon.Parameter(f"layer{i}", shape=(3,)) for i in range(3)]
    for parameter in layers:
        parameter.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(layers, "sgd", {"learning_rate": 1.0, "wd": 0.5})
    with autograd.record():
        loss = (layers[hvd.rank() % 2].data() * (hvd.rank() + 1)).sum()
    loss.backward()
    message = raised(UserWarning, lambda: trainer.step(1))
    assert "has not been updated by backward" in message
    with autograd.record():
        loss = (layers[hvd.rank() % 2].data() * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.step(1, ignore_stale_grad=True)
    values = [parameter.data().asnumpy() for parameter in layers]
    ranks = range(hvd.size())
    for index in range(2):
        mean = sum(rank + 1 for rank in ranks if rank % 2 == index) / hvd.size()
        np.testing.assert_allclose(values[index], [1 - mean - 0.5] * 3, rtol=1e-6)
    assert values[2].tolist() == [1.0] * 3
    assert_equal_on_all_ranks(values)


def check_an_overflow_does_not_last_on_ranks_that_use_different_layers() -> None:
    """The infinite average is in the gradients of all ranks, whose backward() may not reach it."""
    layers = [gluon.Parameter(f"layer{i}", shape=(3,)) for i in range(2)]
    for parameter in layers:
        parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(layers, "sgd", {"learning_rate": 1.0})
    trainer._amp_loss_scaler = scaler = LossScaler()  # as amp.init_trainer does
    used = min(hvd.rank(), 1)
    scale = scaler._next_loss_scale
    for step in range(3):
        factor = np.inf if step == 0 and hvd.rank() == 0 else hvd.rank() + 1.0
        with autograd.record():
            loss = (layers[used].data() * factor).sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        others = sum(range(2, hvd.size() + 1))
        for parameter, total in zip(layers, (1, others), strict=True):
            expected = np.full(3, -step * total / hvd.size())
            np.testing.assert_allclose(parameter.data().asnumpy(), expected, rtol=1e-6)
        assert scaler._next_loss_scale == scale / 2


def check_old_gradients_are_not_averaged_into_new_ones() -> None:
    """allreduce_grads() does not know what update() ignores. Zeros may be averaged."""
    for zeros in (False, True):
        layers = [gluon.Parameter(f"layer{i}", shape=(3,)) for i in range(2)]
        for parameter in layers:
            parameter.initialize(mx.init.One())
        trainer = hvd.DistributedTrainer(layers, "sgd", {"learning_rate": 1.0})
        expected = np.ones((2, 3))
        for step in range(2):
            used = [0, 1] if step == 0 or hvd.rank() == 0 else [0]
            for parameter in layers if zeros else ():
                parameter.zero_grad()
            with autograd.record():
                loss = mx.nd.add_n(*(layers[index].data().sum() for index in used))
            loss.backward()
            trainer.allreduce_grads()
            if step == 1 and not zeros:
                message = raised(ValueError, lambda: trainer.update(1, ignore_stale_grad=True))  # noqa: B023
                assert "of layer1 " in message and "step(" in message
                break
            trainer.update(1, ignore_stale_grad=True)
            expected -= np.array([[1], [1 if step == 0 else 1 / hvd.size()]])
        values = [parameter.data().asnumpy() for parameter in layers]
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def check_row_sparse_gradients() -> None:
    """Ranks use different rows, and different numbers of them."""
    words = [[*[0, 2, 2][: 1 + rank % 3], 5] for rank in range(hvd.size())]

    def trained(make, rows: list[int], steps: int = 3) -> list[np.ndarray]:
        net = gluon.nn.Sequential()
        net.add(gluon.nn.Embedding(6, 4, sparse_grad=True), gluon.nn.Dense(1, in_units=4))
        net.initialize(mx.init.Constant(0.25))
        trainer = make(net.collect_params())
        for _ in range(steps):
            with autograd.record():
                loss = (net(mx.nd.array(rows).reshape((-1, 1)))[:, 0] - mx.nd.array(rows)) ** 2
            loss.backward()
            trainer.step(1)
        return values_of(net)

    adam = {"learning_rate": 0.1, "rescale_grad": 0.5}
    mine = trained(lambda p: hvd.DistributedTrainer(p, "adam", adam), words[hvd.rank()])
    adam["rescale_grad"] /= hvd.size()
    everything = [word for ranks in words for word in ranks]
    right = trained(lambda p: gluon.Trainer(p, "adam", adam, kvstore=None), everything)
    assert_close(mine, right)
    assert (mine[0][[1, 3, 4]] == 0.25).all()
    assert_equal_on_all_ranks(mine)


def check_a_trainer_unwraps_an_optimizer() -> None:
    net = model()
    inner = mx.optimizer.create("sgd", **SGD)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = hvd.DistributedTrainer(net.collect_params(), hvd.DistributedOptimizer(inner))
    assert any("unwrapped" in str(warning.message) for warning in found)
    assert trainer.optimizer is inner
    for step in range(2):
        backward(net, share(global_batch(step)))
        trainer.step(BATCH)
    assert_close(values_of(net), on_one_rank(2))


def check_what_a_trainer_cannot_do_is_an_error() -> None:
    rows = gluon.Parameter("rows", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
    rows.initialize()
    message = raised(ValueError, lambda: hvd.DistributedTrainer([rows], "sgd", SGD))
    assert "row_sparse" in message and "dist_sync_perseus" in message
    two = gluon.nn.Dense(1, in_units=1)
    two.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    message = raised(ValueError, lambda: hvd.DistributedTrainer(two.collect_params(), "sgd", SGD))
    assert "one context" in message


def check_others_train_alone() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        first = hvd.add_process_set([0])
        net = model()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, process_set=first)
        alone = model()
        plain = gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None)
        for step in range(2):
            for one, steps in ((net, trainer), (alone, plain)):
                backward(one, share(global_batch(step)))
                steps.step(BATCH)
        assert_close(values_of(net), values_of(alone))
        hvd.remove_process_set(first)
        assert "has not been registered" in raised(ValueError, lambda: trainer.step(BATCH))


class _Hold(mx.operator.CustomOp):
    """The identity, whose gradient comes when some more reductions have been finished."""

    awaited = 0
    in_time = False

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):  # noqa: PLR0917 - MXNet's
        deadline = time.monotonic() + 60
        while perseus.stats()["operations"] < _Hold.awaited and time.monotonic() < deadline:
            time.sleep(0.001)
        _Hold.in_time = perseus.stats()["operations"] >= _Hold.awaited
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("perseus_hold")
class _HoldProperties(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Hold()


def check_reductions_run_while_gradients_are_computed() -> None:
    """The first layer's gradient waits for the reductions of the others.

    Of those of 64 KiB sixteen share an op of the engine, which fills its MiB.
    """
    for count, elements, together in ((3, 1 << 18, 1), (48, 1 << 14, 16)):
        with world_with(HOROVOD_TIMELINE="DYNAMIC", PERSEUS_TIMELINE_ALL_RANKS=1):
            layers = [gluon.Parameter(f"layer{i:02}", shape=(elements,)) for i in range(count)]
            for parameter in layers:
                parameter.initialize(mx.init.One())
            trainer = hvd.DistributedTrainer(layers, "sgd", {"learning_rate": 0.0})
            folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else ""))
            hvd.start_timeline(folder / "overlap.json")
            _Hold.awaited = perseus.stats()["operations"] + count - together
            with autograd.record():
                product = mx.nd.Custom(layers[0].data() * 2, op_type="perseus_hold")
                for parameter in layers[1:]:
                    product = product * parameter.data()
                loss = product.sum() * (hvd.rank() + 1)
            loss.backward()
            trainer.step(1)
            mean = (hvd.size() + 1) / 2
            for parameter in layers:
                assert (parameter.grad().asnumpy() == 2 * mean).all()
            assert _Hold.in_time
            hvd.stop_timeline()
            suffix = f".rank{hvd.rank()}" if hvd.rank() else ""
            found = {o.name: o for o in read(folder / f"overlap{suffix}.json").operations}
            reduced = [found[f"allreduce.{i}"] for i in range(count)]
            first = min(operation.submitted for operation in reduced[:together])
            assert all(other.ended <= first for other in reduced[together:]), found
