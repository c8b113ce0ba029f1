"""PerseusSyncBatchNorm where layers, uses of one and errors come in any order; scopes."""

from __future__ import annotations

import os
from typing import Any

import mxnet as mx
import numpy as np
from mx_sync_batch_norm_checks import (
    CHANNELS,
    _close,
    _layers,
    _mine,
    _rows,
    _step,
    _sum,
    _weights,
    _whole,
)
from mx_values import raised, usable
from mxnet import autograd, nd
from mxnet.gluon.contrib.nn import PerseusSyncBatchNorm

import perseus.mxnet as hvd
from perseus.process_sets import ids_and_ranks, of_host


def check_layers_in_flight_in_another_order_on_each_rank() -> None:
    """Independent layers; nothing is waited for before all of it is pushed."""
    count, rows = 12, _rows("uneven")
    layers = [_layers("float32", ("plain", "hybridised")[i % 2]) for i in range(count)]
    order = list(range(count)) if hvd.rank() == 0 else list(range(count))[::-1]
    whole = [_whole(sum(rows), 4, salt) for salt in range(count)]
    weights = [_weights(sum(rows), 4, salt) for salt in range(count)]
    results: dict[int, Any] = {}
    for index in order:
        results[index] = _step(
            layers[index][0], _mine(whole[index], rows), _mine(weights[index], rows), "float32"
        )
    for index in range(count):
        expected = _step(layers[index][1], whole[index], weights[index], "float64")
        for got, wanted in zip(results[index], expected, strict=True):
            _close(got, _mine(wanted.asnumpy(), rows), 5e-5)


def _twice(layer: Any, batches: Any, scales: tuple[float, float], dtype: str = "float32") -> Any:
    """Gradients of two inputs of one layer in one loss."""
    values = [nd.array(batch, dtype=dtype) for batch in batches]
    for value in values:
        value.attach_grad()
    with autograd.record():
        loss = sum(
            (layer(value) ** 3 * scale).sum() for value, scale in zip(values, scales, strict=True)
        )
    loss.backward()
    return [value.grad for value in values]


def check_one_layer_used_several_times_in_a_loss() -> None:
    """Their backward passes are under way together, over steps without a wait between them."""
    rows, scales = _rows("uneven"), (1.0, -2.0)
    for form in ("plain", "hybridised", "static"):
        synced, plain = _layers("float32", form)
        results = []
        wholes = [[_whole(sum(rows), 4, 2 * step + i) for i in (0, 1)] for step in range(6)]
        for layer in (synced, plain):
            layer(nd.zeros((1, CHANNELS, 1, 1), dtype=layer.gamma.dtype))
            for parameter in layer.collect_params().values():
                if parameter.grad_req != "null":
                    parameter.grad_req = "add"
        for pair in wholes:
            results.append(_twice(synced, [_mine(whole, rows) for whole in pair], scales))
        for pair, grads in zip(wholes, results, strict=True):
            for got, wanted in zip(grads, _twice(plain, pair, scales, "float64"), strict=True):
                _close(got, _mine(wanted.asnumpy(), rows), 2e-4)
        _close(synced.running_var.data(), plain.running_var.data(), 1e-5)
        wanted = plain.gamma.grad()
        _close(_sum(synced.gamma.grad()) / wanted.abs().max(), wanted / wanted.abs().max(), 1e-5)


def check_disagreement_is_an_error_and_the_layer_goes_on() -> None:
    shape = (2, 2 + hvd.rank())
    name = {"comm_scope": 1, "name": "disagree"}

    def step(channels: int) -> Any:
        arrays = [nd.ones(channels), nd.zeros(channels), nd.zeros(channels), nd.ones(channels)]
        mine = nd.array(np.arange(2 * channels).reshape(2, channels) + 10 * hvd.rank())
        mine.attach_grad()
        with autograd.record():
            output = mx.nd.contrib.PerseusSyncBatchNorm(mine, *arrays, **name)
            loss = output * output
        loss.backward()
        return mine.grad

    def wrong() -> None:
        step(shape[1]).wait_to_read()

    message = raised(mx.base.MXNetError, wrong)
    assert "sync_batch_norm.disagree.forward" in message, message
    usable()
    for _ in range(2):
        assert np.isfinite(step(3).asnumpy()).all()


def check_scope_of_a_host() -> None:
    """As if each rank had a host of its own. The last check: the world is another one then."""
    hvd.shutdown()
    for name in ("HOROVOD", "PERSEUS"):
        os.environ |= {f"{name}_LOCAL_RANK": "0", f"{name}_LOCAL_SIZE": "1"}
        os.environ |= {f"{name}_CROSS_RANK": os.environ["HOROVOD_RANK"]}
        os.environ |= {f"{name}_CROSS_SIZE": os.environ["HOROVOD_SIZE"]}
    hvd.init()
    assert hvd.local_size() == 1
    assert of_host().ranks == [hvd.rank()]
    everyone = list(range(hvd.size()))
    assert sorted(ids_and_ranks().values()) == sorted([everyone, *([rank] for rank in everyone)])
    batch, weights = _whole(4, 4, hvd.rank()), _weights(4, 4)
    _, plain = _layers("float32", "plain")
    synced = PerseusSyncBatchNorm(comm_scope=0)
    synced.initialize()
    ours = _step(synced, batch, weights, "float32")
    for got, wanted in zip(ours, _step(plain, batch, weights, "float64"), strict=True):
        _close(got, wanted, 2e-5)
