"""DistributedOptimizer: training on many ranks is training on one."""

from __future__ import annotations

import copy
import pickle

import mxnet as mx
import numpy as np
from mx_training import (
    BATCH,
    SGD,
    assert_close,
    assert_equal_on_all_ranks,
    backward,
    global_batch,
    model,
    on_one_rank,
    raised,
    share,
    values_of,
)

import perseus.mxnet as hvd


def _with_updater(optimizer: mx.optimizer.Optimizer, together: bool, steps: int) -> list:
    """The weights after steps in a loop of one's own."""
    net = model()
    update = mx.optimizer.get_updater(optimizer)
    parameters = list(net.collect_params().values())
    for step in range(steps):
        backward(net, share(global_batch(step)))
        weights, gradients = [p.data() for p in parameters], [p.grad() for p in parameters]
        if together:
            update(list(range(len(weights))), gradients, weights)
        else:
            for index, weight in enumerate(weights):
                update(index, gradients[index], weight)
    return values_of(net)


def check_an_optimizer_equals_one_rank_on_the_global_batch() -> None:
    for together, options in (
        (False, {}),
        (True, {}),
        (True, {"num_groups": 1}),
        (True, {"num_groups": 3, "gradient_predivide_factor": 4.0}),
    ):
        inner = mx.optimizer.create("sgd", rescale_grad=1 / BATCH, **SGD)
        optimizer = hvd.DistributedOptimizer(inner, **options)
        weights = _with_updater(optimizer, together, 4)
        assert_close(weights, on_one_rank(4))
        assert_equal_on_all_ranks(weights)
        assert optimizer.num_update == inner.num_update == 4


def _fitted(rows: np.ndarray, optimizer: mx.optimizer.Optimizer) -> list[np.ndarray]:
    """A linear module's weights after two epochs of two batches."""
    targets = rows @ np.array([[1.0], [-2.0], [0.5]], np.float32)
    output = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")
    loss = mx.sym.LinearRegressionOutput(output, mx.sym.Variable("target"), name="loss")
    module = mx.mod.Module(loss, data_names=["data"], label_names=["target"])
    first = {"fc_weight": mx.nd.ones((1, 3)) * 0.1, "fc_bias": mx.nd.zeros((1,))}
    module.fit(
        mx.io.NDArrayIter(rows, targets, batch_size=len(rows) // 2, label_name="target"),
        num_epoch=2, kvstore=None, optimizer=optimizer, arg_params=first, eval_metric="mse",
    )  # fmt: skip
    return [array.asnumpy() for _, array in sorted(module.get_params()[0].items())]


def check_module_fit_with_an_optimizer() -> None:
    size, rank = hvd.size(), hvd.rank()
    batches = np.random.default_rng(3).normal(size=(2, size, 4, 3)).astype(np.float32)

    def sgd(batch: int) -> mx.optimizer.Optimizer:
        return mx.optimizer.create("sgd", learning_rate=0.2, momentum=0.9, rescale_grad=1 / batch)

    mine = _fitted(batches[:, rank].reshape(-1, 3), hvd.DistributedOptimizer(sgd(4)))
    assert_close(mine, _fitted(batches.reshape(-1, 3), sgd(4 * size)))
    assert_equal_on_all_ranks(mine)


def check_an_optimizer_is_the_one_it_wraps() -> None:
    inner = mx.optimizer.create("adam", learning_rate=0.25)
    optimizer = hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0, num_groups=3)
    assert (optimizer.beta1, optimizer.learning_rate) == (0.9, 0.25)
    optimizer.rescale_grad = 0.5
    optimizer.set_learning_rate(0.125)
    optimizer.set_lr_mult({"a": 2.0})
    optimizer.set_wd_mult({"b": 3.0})
    assert (inner.rescale_grad, inner.lr) == (0.5, 0.125)
    assert (inner.lr_mult, inner.wd_mult["b"]) == ({"a": 2.0}, 3.0)
    assert "nothing" in raised(AttributeError, lambda: optimizer.nothing)
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(again) is hvd.DistributedOptimizer
        assert again._optimizer is not inner and again.lr == 0.125
        assert (again._reducer.plan.predivide_factor, again._num_groups) == (2.0, 3)
        assert again._reducer.takes_part()
        # Not a copy, which would keep the ranks of the world that pickled it.
        assert again._reducer.plan.process_set is hvd.global_process_set
