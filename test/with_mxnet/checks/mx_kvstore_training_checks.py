"""Training with the KVStore ends where one process ends that has the batches of all ranks."""

from __future__ import annotations

import os
import tempfile
import warnings

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_values import as_array, assert_equal, everyone, mine, numbers, raised
from mxnet import autograd, gluon

import perseus.mxnet as hvd
from perseus.mxnet.sparse import sum_rows

STEPS, BATCH = 4, 6
WORDS, WIDTH = 23, 3


def _rows(rank: int, step: int) -> np.ndarray:
    return numbers((BATCH, 5), rank, step)


def _all_rows(step: int) -> np.ndarray:
    return np.concatenate([_rows(rank, step) for rank in range(hvd.size())])


def _dense(start: int) -> gluon.Block:
    """One layer, whose weights depend on `start`."""
    net = gluon.nn.Dense(2, in_units=5)
    net.initialize()
    net.weight.set_data(as_array(numbers((2, 5), start)))
    return net


def _train(net, trainer, rows, total: int, steps=range(STEPS)) -> list[np.ndarray]:
    """Gradients do not depend on weights, so that all numbers are exact."""
    for step in steps:
        with autograd.record():
            loss = (net(as_array(rows(step))) * mx.nd.array([1, 2])).sum()
        loss.backward()
        trainer.step(total)
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def _trainer(net, kvstore, **more) -> gluon.Trainer:
    options = {"learning_rate": 0.5, "momentum": 0.5}
    return gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore, **more)


def _expected(steps=range(STEPS)) -> list[np.ndarray]:
    """One process on the joined batch; divided by 16, which is exact."""
    net = _dense(0)
    return _train(net, _trainer(net, None), _all_rows, 16, steps)


def check_a_trainer() -> None:
    """update_on_kvstore True, False and None, with the variable; by name and by the store."""
    expected = _expected()
    for kvstore, where, variable in (
        ("dist_sync_perseus", None, "1"),
        ("dist_sync_perseus", None, "0"),
        ("dist-sync-perseus", True, "1"),
        (hvd.create(), False, "1"),
        (hvd.create(), True, "1"),
    ):
        os.environ["MXNET_UPDATE_ON_KVSTORE"] = variable
        net = _dense(hvd.rank())
        trainer = _trainer(net, kvstore, update_on_kvstore=where)
        results = _train(net, trainer, lambda step: _rows(hvd.rank(), step), 16)
        assert trainer._update_on_kvstore == (variable == "1" if where is None else where)
        for array, right in zip(results, expected, strict=True):
            assert_equal(array, right)
    del os.environ["MXNET_UPDATE_ON_KVSTORE"]


def check_a_trainer_goes_on_with_saved_states() -> None:
    for where in (True, False):
        net = _dense(hvd.rank())
        mine_ = lambda step: _rows(hvd.rank(), step)  # noqa: E731
        trainer = _trainer(net, "dist_sync_perseus", update_on_kvstore=where)
        _train(net, trainer, mine_, 16, range(2))
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_states(f"{folder}/states")
            trainer = _trainer(net, "dist_sync_perseus", update_on_kvstore=where)
            trainer.load_states(f"{folder}/states")
        results = _train(net, trainer, mine_, 16, range(2, STEPS))
        for array, right in zip(results, _expected(), strict=True):
            assert_equal(array, right)


def check_two_trainers_at_once() -> None:
    """Stores keep their keys apart, which are both 0, 1, …."""
    nets = [_dense(hvd.rank()) for _ in range(2)]
    trainers = [_trainer(net, "dist_sync_perseus") for net in nets]
    for step in range(STEPS):
        for net in nets:
            with autograd.record():
                out = net(as_array(_rows(hvd.rank(), step))) * mx.nd.array([1, 2])
            out.backward()
        for trainer in trainers:
            trainer.step(16)
    for net in nets:
        for parameter, right in zip(net.collect_params().values(), _expected(), strict=True):
            assert_equal(parameter.data(), right)


def check_a_store_serves_one_trainer_after_the_other() -> None:
    """As in folds of a cross-validation; the first may not go on then."""
    kv, rows = hvd.create(), lambda step: _rows(hvd.rank(), step)
    nets = [_dense(hvd.rank()) for _ in range(2)]
    trainers = [_trainer(net, kv) for net in nets]
    for net, trainer in zip(nets, trainers, strict=True):
        _train(net, trainer, rows, 16)
    values = [parameter.data().asnumpy() for parameter in nets[1].collect_params().values()]
    message = raised(ValueError, lambda: _train(nets[0], trainers[0], rows, 16, range(1)))
    assert "two trainers share this store" in message
    kv.pull(1, nets[1].weight.list_data())  # sorted by name, the bias comes first
    assert_equal(nets[1].weight.data(), values[0])


def check_a_distributed_optimizer_is_unwrapped() -> None:
    """By hand and by a Trainer: its sums over steps would be sums of the store's sums."""
    with (
        settings.world_with(PERSEUS_ACCUMULATE_N_STEPS=2),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        inner = mx.optimizer.create("sgd", learning_rate=0.5)
        kv = hvd.create()
        kv.set_optimizer(hvd.DistributedOptimizer(inner))
        assert kv._updater.optimizer is inner
        assert sum("KVStore does not take" in str(warning.message) for warning in found) == 1
        net = _dense(hvd.rank())
        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.5))
        trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore="dist_sync_perseus")
        _train(net, trainer, lambda step: _rows(hvd.rank(), step), 16, range(2))
        options = {"learning_rate": 0.5}
        right = _dense(0)
        plain = gluon.Trainer(right.collect_params(), "sgd", options, kvstore=None)
        expected = _train(right, plain, _all_rows, 16, range(2))
        for parameter, wanted in zip(net.collect_params().values(), expected, strict=True):
            assert_equal(parameter.data(), wanted)


def check_a_trainers_compression() -> None:
    net = _dense(hvd.rank())
    trainer = _trainer(net, "dist_sync_perseus", compression_params={"type": "1bit"})
    assert "'1bit'" in raised(ValueError, lambda: _train(net, trainer, _all_rows, 16))
    with settings.apart():
        net = _dense(hvd.rank())
        options = {"type": "topk", "ratio": 0.5}  # half of the numbers are held back
        trainer = _trainer(net, "dist_sync_perseus", compression_params=options)
        rows = lambda step: _rows(hvd.rank(), step)  # noqa: E731
        weight = _train(net, trainer, rows, 16, range(1))[0]
        assert not np.array_equal(weight, _expected(range(1))[0])
        settings.assert_same_everywhere([weight])


def check_parameters_are_loaded_before_a_trainers_first_step() -> None:
    """Later, gluon would begin with a new store, which it does not do for stores named `dist…`."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize()

    def trainer(**how: bool) -> gluon.Trainer:
        return gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="dist_sync_perseus", **how
        )

    def load_and_step(trainer: gluon.Trainer, start: float) -> None:
        net.weight.set_data(mx.nd.array([[start]]))
        with autograd.record():
            loss = net(mx.nd.ones((1, 1))).sum()
        loss.backward()
        trainer.step(hvd.size())
        assert_equal(net.weight.data(), [[start - 1]])

    load_and_step(trainer(), 3)
    text = raised(RuntimeError, lambda: net.weight.set_data(mx.nd.array([[5]])))
    assert text == "Cannot reset distributed KVStore."
    load_and_step(trainer(), 7)
    third = trainer(update_on_kvstore=False)
    for start in (9, 4):
        load_and_step(third, start)


# ---- sparse gradients


def _words(rank: int, step: int) -> np.ndarray:
    """Word numbers, of which no two ranks have the same; some come twice."""
    return (np.arange(5) % 3 * 2 + rank + 7 * step) % WORDS


def _embedding(start: int, weight_is_sparse: bool) -> gluon.Block:
    if weight_is_sparse:
        net = gluon.contrib.nn.SparseEmbedding(WORDS, WIDTH)
    else:
        net = gluon.nn.Embedding(WORDS, WIDTH, sparse_grad=True)
    net.initialize(Numbers(start))
    return net


class Numbers(mx.init.Initializer):
    """Whole ones, which depend on `start`."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def _init_weight(self, name: str, array: mx.nd.NDArray) -> None:
        array[:] = as_array(numbers(array.shape, self._start))


def _train_words(kvstore, start: int, weight_is_sparse: bool, words) -> np.ndarray:
    net = _embedding(start, weight_is_sparse)
    # Of distributed stores with sparse weights MXNet wants the scale from the start.
    options = {"learning_rate": 0.5, "momentum": 0.5, "rescale_grad": 1 / 16}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore)
    for step in range(STEPS):
        found = words(step)
        with autograd.record():
            scale = mx.nd.array(found % 4 + 1).reshape((-1, 1))
            loss = (net(mx.nd.array(found)) * scale).sum()
        loss.backward()
        trainer.step(1)
    if weight_is_sparse:
        return net.weight.row_sparse_data(mx.nd.arange(WORDS)).asnumpy()
    return net.weight.data().asnumpy()


def check_sparse_gradients_of_a_trainer() -> None:
    def all_words(step: int) -> np.ndarray:
        return np.concatenate([_words(rank, step) for rank in range(hvd.size())])

    def my_words(step: int) -> np.ndarray:
        return _words(hvd.rank(), step)

    rank = hvd.rank()
    for name in ("dist_sync_perseus", "dist-sync-perseus"):
        for sparse, local in ((False, None), (True, "local")):
            assert_equal(
                _train_words(name, rank, sparse, my_words),
                _train_words(local, 0, sparse, all_words),
            )
    assert_equal(
        _train_words(hvd.create(), rank, True, my_words), _train_words("local", 0, True, all_words)
    )


def check_zero_grad_lets_ranks_use_different_layers() -> None:
    """Where the store runs the updates; without it, old gradients are pushed again."""
    for zeroes in (True, False):
        both = gluon.ParameterDict()
        first, second = (both.get(name, shape=(1,), init="zeros") for name in ("first", "second"))
        both.initialize()
        options = {"learning_rate": 1.0}
        trainer = gluon.Trainer(both, "sgd", options, kvstore="dist_sync_perseus")
        for step in range(3):
            if zeroes:
                both.zero_grad()
            with autograd.record():
                if step == 0:
                    loss = first.data() + 10 * second.data()
                else:
                    loss = first.data() if hvd.rank() == 0 else 10 * second.data()
            loss.backward()
            trainer.step(1, ignore_stale_grad=True)
        size = hvd.size()
        fresh = (size + 2, size + 2 * (size - 1)) if zeroes else (3 * size, 3 * size)
        assert_equal(first.data(), [-fresh[0]])
        assert_equal(second.data(), [-10 * fresh[1]])


def _sparse(rows: dict[int, int], shape=(WORDS, WIDTH), dtype="float32"):
    """Row-sparse: each row filled with a number."""
    if not rows:
        return mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)
    data = np.stack([np.full(shape[1:], number, dtype) for number in rows.values()])
    return mx.nd.sparse.row_sparse_array((data, list(rows)), shape=shape, dtype=dtype)


def check_sparse_sums_by_hand() -> None:
    kv, rank, size = hvd.create(), hvd.rank(), hvd.size()
    shape = (WORDS, WIDTH)
    for dtype in ("float16", "float32", "float64"):
        kv.init("g", _sparse({}, dtype=dtype))
        for rows in ({}, {rank: rank + 1, 9: rank + 2}, {} if rank == 0 else {22: rank}):
            given = _sparse(rows, dtype=dtype)
            kv.push("g", given)
            dense, out = mx.nd.zeros(shape, dtype=dtype), _sparse({}, dtype=dtype)
            kv.pull("g", dense)
            kv.pull("g", out)
            total = hvd.allreduce(given.tostype("default"), op=hvd.Sum)
            assert_equal(dense, total.asnumpy())
            assert_equal(out, total.asnumpy())
            chosen = mx.nd.array([9, 22], dtype="int64")
            kv.row_sparse_pull("g", out, row_ids=chosen)
            assert_equal(out.tostype("default")[[9, 22]], total[[9, 22]].asnumpy())
            assert set(out.indices.asnumpy().tolist()) <= {9, 22}
    # Each device of a rank has rows of its own.
    both = [_sparse({1: 1, 4: 2}), _sparse({4: 3, 5: rank})]
    kv.init("h", _sparse({}))
    kv.pushpull("h", both)
    expected = np.zeros(shape)
    expected[1], expected[4], expected[5] = size, 5 * size, sum(range(size))
    for array in both:
        assert array.stype == "row_sparse"
        assert_equal(array, expected)


def check_sparse_sums_are_on_the_cpu_whatever_the_present_device() -> None:
    """cpu(1) takes the place of a GPU."""
    shape, here = (WORDS, WIDTH), hvd.rank()
    with mx.cpu(1):
        for rows in ({here: 1}, {}):
            given = _sparse(rows)
            assert given.context == mx.cpu(1)
            total = sum_rows([given], "present", 0, 0)
            assert total.context == mx.cpu(0)
        kv = hvd.create()
        kv.init("g", _sparse({}))
        kv.push("g", _sparse({here: 1}))
        assert kv._values["g"].array.context == mx.cpu(0)
        kv.init("dense", mine(shape))
        for key, expected in (("g", 1), ("dense", everyone(shape)[0][here])):
            out = _sparse({})
            kv.row_sparse_pull(key, out, row_ids=mx.nd.array([here], dtype="int64"))
            assert out.context == mx.cpu(1)
            assert_equal(out.data, np.broadcast_to(expected, (1, WIDTH)))


def check_sparse_arrays_of_different_lengths_are_refused() -> None:
    rows = WORDS + (hvd.rank() == 1)
    given = mx.nd.sparse.zeros("row_sparse", (rows, WIDTH))
    text = raised(mx.base.MXNetError, lambda: sum_rows([given], "uneven", 0, 0))
    assert f"uneven: ranks have row-sparse arrays of {WORDS} and {WORDS + 1} rows" in text


def check_rows_of_a_sparse_weight() -> None:
    """With an optimizer: only rows that some rank has a gradient for change."""
    kv = hvd.create()
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    kv.init("w", mine((WORDS, WIDTH)).tostype("row_sparse"))
    kv.push("w", _sparse({hvd.rank(): 1, 8: 2}))
    expected = everyone((WORDS, WIDTH))[0]
    for rank in range(hvd.size()):
        expected[rank] -= 1
        expected[8] -= 2
    chosen = np.zeros_like(expected)
    chosen[[0, 8, 20]] = expected[[0, 8, 20]]
    outs = [_sparse({3: 7}), _sparse({})]
    kv.row_sparse_pull("w", outs, row_ids=mx.nd.array([20, 8, 0, 8], dtype="int64"))
    for out in outs:
        assert out.indices.asnumpy().tolist() == [0, 8, 20]
        assert_equal(out, chosen)
    for row_ids in ([mx.nd.array([1])], mx.nd.array([1], dtype="int64")):
        outs[0] = _sparse({})
        kv.row_sparse_pull(["w"], out=[outs[0]], row_ids=row_ids)
        assert_equal(outs[0].data, expected[1:2])
    whole = mx.nd.zeros((WORDS, WIDTH))
    kv.pull("w", [whole, outs[1]])
    assert_equal(whole, expected)
    assert_equal(outs[1], chosen)  # row_sparse_pull is for these
    text = raised(ValueError, lambda: kv.row_sparse_pull("w", outs, row_ids=[mx.nd.array([1])] * 3))
    assert "3 row_ids" in text


# ---- Module


def _symbol() -> mx.sym.Symbol:
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="hidden")
    hidden = mx.sym.Activation(hidden, act_type="tanh")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=3), name="softmax")


def _fit(kvstore, images, labels, batch_size: int, seed: int) -> list[np.ndarray]:
    mx.random.seed(seed)
    model = mx.mod.Module(_symbol())
    model.fit(
        mx.io.NDArrayIter(images, labels, batch_size),
        kvstore=kvstore,
        optimizer_params={"learning_rate": 0.5, "momentum": 0.9},
        initializer=mx.init.Xavier(),
        num_epoch=2,
    )
    weights, _ = model.get_params()
    return [weights[name].asnumpy() for name in sorted(weights)]


def check_module_fit() -> None:
    """Steps as of one process with the joined batch, wherever Module has the updates done."""
    size, rank, steps = hvd.size(), hvd.rank(), 5
    count = steps * size * BATCH
    images, labels = numbers((count, 5), 0).astype(np.float32) / 8, np.arange(count) % 3
    expected = _fit(None, images, labels, size * BATCH, seed=1)
    # Of every joined batch each rank has its part.
    mine_ = (np.arange(count) // BATCH) % size == rank
    for variable, seed in (("1", 1 + rank), ("0", 1)):
        os.environ["MXNET_UPDATE_ON_KVSTORE"] = variable
        fitted = _fit("dist_sync_perseus", images[mine_], labels[mine_], BATCH, seed)
        for array, right in zip(fitted, expected, strict=True):
            np.testing.assert_allclose(array, right, rtol=0, atol=1e-6)
        settings.assert_same_everywhere(fitted)
    text = raised(
        ValueError,
        lambda: _fit("dist_sync_perseus", images[mine_], labels[mine_], BATCH, seed=1 + rank),
    )
    assert "MXNET_UPDATE_ON_KVSTORE=0" in text
    del os.environ["MXNET_UPDATE_ON_KVSTORE"]
