"""PERSEUS_PARAMETER_CHECK_N_STEPS with the trainer, the optimizer and the store."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
from mx_training import raised
from mxnet import autograd
from worlds import world_with

import perseus.mxnet as hvd
from perseus.errors import MismatchError
from perseus.mxnet.parameter_check import WeightsByKey


def _net() -> tuple[mx.gluon.Block, mx.gluon.ParameterDict]:
    mx.random.seed(3)
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(3, in_units=4), mx.gluon.nn.Dense(2, in_units=3))
    net.initialize()
    return net, net.collect_params()


def _distributed(parameters: mx.gluon.ParameterDict) -> mx.gluon.Trainer:
    return hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": 0.01})


def _optimizer(parameters: mx.gluon.ParameterDict) -> mx.gluon.Trainer:
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.01))
    return mx.gluon.Trainer(parameters, optimizer, kvstore=None)


def _store(parameters: mx.gluon.ParameterDict, update: bool) -> mx.gluon.Trainer:
    return mx.gluon.Trainer(
        parameters, "sgd", {"learning_rate": 0.01}, kvstore="dist_sync_perseus",
        update_on_kvstore=update,
    )  # fmt: skip


WAYS: dict[str, Callable[[mx.gluon.ParameterDict], mx.gluon.Trainer]] = {
    "trainer": _distributed,
    "optimizer": _optimizer,
    "store": lambda parameters: _store(parameters, update=True),
    "pushpull": lambda parameters: _store(parameters, update=False),
}


def _steps(net: mx.gluon.Block, trainer: mx.gluon.Trainer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        batch = mx.nd.full((4, 4), step + hvd.rank() + 1.0)
        with autograd.record():
            loss = (net(batch) ** 2).sum()
        loss.backward()
        trainer.step(4)


def _move_apart(way: str, trainer: mx.gluon.Trainer) -> None:
    """Change the third parameter on the last rank, where that way keeps it."""
    if hvd.rank() < hvd.size() - 1:
        return
    if way == "store":
        values = trainer._kvstore._values
        weight = values[list(values)[2]].array
    else:
        weight = trainer._params[2].list_data()[0]
    weight[0] = weight[0] + 1e-3


def check_the_first_parameter_that_differs_is_named() -> None:
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
        for way, make in WAYS.items():
            net, parameters = _net()
            trainer = make(parameters)
            _steps(net, trainer, 1)
            mx.nd.waitall()
            _move_apart(way, trainer)
            _steps(net, trainer, 1, 1)
            message = raised(
                MismatchError, lambda n=net, t=trainer: (_steps(n, t, 1, 2), mx.nd.waitall())
            )
            assert "after 2 steps the parameter " in message, (way, message)
            assert f" on rank {hvd.size() - 1}); of 4 parameters 1 differs" in message, message
            if way in ("trainer", "optimizer"):
                assert f"the parameter {trainer._params[2].name} is" in message, message


def check_equal_parameters_pass() -> None:
    for steps in (1, 2):
        with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=steps):
            for make in WAYS.values():
                net, parameters = _net()
                _steps(net, make(parameters), 4)
                mx.nd.waitall()


def check_a_new_rank_lacks_what_is_not_trained_any_more() -> None:
    """The last rank is new in the second world; the others have left a step in its middle."""
    weights = {key: mx.nd.full((3,), len(key)) for key in ("a", "bb", "ccc")}
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
        compared = WeightsByKey()
        for key in ("a", "bb", "ccc", "a"):
            compared.update(key, weights[key])
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2):
        if hvd.rank() == hvd.size() - 1:
            compared = WeightsByKey()
        for key in ("bb", "a") * 4:
            compared.update(key, weights[key])
        weights["bb"][0] = hvd.rank()
        message = raised(
            MismatchError, lambda: [compared.update(key, weights[key]) for key in ("bb", "a") * 2]
        )
        assert "the parameter bb is" in message and "of 2 parameters 1 differs" in message
