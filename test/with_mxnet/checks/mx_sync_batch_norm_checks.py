"""PerseusSyncBatchNorm on each rank's rows, against MXNet's BatchNorm on all of them."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mx_values import raised
from mxnet import autograd, nd
from mxnet.gluon.contrib.nn import PerseusSyncBatchNorm

import perseus.mxnet as hvd
from perseus.process_sets import of_host

CHANNELS = 3
TAILS = {2: (), 3: (4,), 4: (2, 5), 5: (2, 1, 3)}
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-2}


def _rows(kind: str) -> list[int]:
    n = hvd.size()
    return [4] * n if kind == "even" else [3 * rank + 1 for rank in range(n)]


def _whole(rows: int, ndim: int, salt: int = 0) -> Any:
    """A batch whose channels, dimension 1, differ in mean and spread."""
    generator = np.random.RandomState(17 + salt)
    shape = (1, CHANNELS, *[1] * (ndim - 2))
    noise = generator.normal(size=(rows, CHANNELS, *TAILS[ndim]))
    spread, middle = np.array([1.0, 5.0, 0.25]), np.array([0.0, -7.0, 3.0])
    return noise * spread.reshape(shape) + middle.reshape(shape)


def _weights(rows: int, ndim: int, salt: int = 0) -> Any:
    """Gradients of outputs, around 0: of others little is left, in MXNet's own layer too."""
    return np.random.RandomState(90 + salt).normal(size=(rows, CHANNELS, *TAILS[ndim]))


def _mine(whole: Any, rows: list[int]) -> Any:
    first = sum(rows[: hvd.rank()])
    return whole[first : first + rows[hvd.rank()]]


def _close(got: Any, expected: Any, tolerance: float) -> None:
    """Tolerance: of the largest of the values, or of 1."""
    got, expected = (
        (x.asnumpy() if isinstance(x, nd.NDArray) else x).astype(float) for x in (got, expected)
    )
    largest = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest)


def _sum(array: Any) -> Any:
    """Over the ranks."""
    return hvd.allreduce(array.astype("float64"), op=hvd.Sum, name="share")


def _step(layer: Any, batch: Any, weights: Any, dtype: str) -> tuple[Any, Any]:
    """(output, the input's gradient) of a weighted sum of the outputs."""
    values = nd.array(batch, dtype=dtype)
    values.attach_grad()
    with autograd.record():
        output = layer(values)
        loss = (output * nd.array(weights, dtype=dtype)).sum()
    loss.backward()
    return output, values.grad


def _set(layer: Any) -> None:
    for index, parameter in enumerate([layer.gamma, layer.beta]):
        if parameter.grad_req != "null":
            parameter.set_data(nd.array([1.5, -0.5, 2.0]) + index)


def _layers(dtype: str, form: str, **options: Any) -> tuple[Any, Any]:
    layers = PerseusSyncBatchNorm(comm_scope=1, **options), mx.gluon.nn.BatchNorm(**options)
    for layer, kind in zip(layers, (dtype, "float64"), strict=True):
        layer.initialize()
        layer.cast(kind)
    if form != "plain":
        layers[0].hybridize(static_alloc=form == "static")
    return layers


def _compare(kind: str, ndim: int, dtype: str, form: str, **options: Any) -> None:
    rows, tolerance = _rows(kind), TOLERANCE[dtype]
    synced, plain = _layers(dtype, form, **options)
    for step in range(3):
        whole = _whole(sum(rows), ndim, step).astype(dtype)
        weights = _weights(sum(rows), ndim, step).astype(dtype)
        output, grad = _step(synced, _mine(whole, rows), _mine(weights, rows), dtype)
        expected, wanted = _step(plain, whole, weights, "float64")
        assert output.dtype == np.dtype(dtype)
        _close(output, _mine(expected.asnumpy(), rows), tolerance)
        _close(grad, _mine(wanted.asnumpy(), rows), tolerance)
        for name in ("gamma", "beta"):
            if getattr(plain, name).grad_req != "null":
                total = _sum(getattr(synced, name).grad())
                _close(total, getattr(plain, name).grad(), tolerance)
        for name in ("running_mean", "running_var"):
            _close(getattr(synced, name).data(), getattr(plain, name).data(), tolerance)
        if step == 0:
            _set(synced)
            _set(plain)


def check_equals_plain_normalisation_of_the_joined_batch() -> None:
    for form in ("plain", "hybridised", "static"):
        for kind in ("even", "uneven"):
            _compare(kind, 4, "float32", form)
        _compare("uneven", 2, "float64", form, momentum=0.75, epsilon=0.5)
        _compare("uneven", 3, "float32", form, center=False, scale=False, in_channels=CHANNELS)
        _compare("uneven", 5, "float16", form)


def check_statistics_of_values_far_from_zero() -> None:
    rows = _rows("uneven")
    synced, plain = _layers("float32", "plain")
    whole = _whole(sum(rows), 4) / 100 + 300
    expected, _ = _step(plain, whole, whole, "float64")
    output, _ = _step(synced, _mine(whole, rows), _mine(whole, rows), "float32")
    _close(output, _mine(expected.asnumpy(), rows), 1e-2)
    _close(synced.running_var.data(), plain.running_var.data(), 1e-4)


def _executor(symbol: Any, shape: tuple[int, ...], grad_req: str = "write") -> Any:
    executor = symbol.simple_bind(mx.cpu(), data=shape, grad_req=grad_req)
    for name, array in [*executor.arg_dict.items(), *executor.aux_dict.items()]:
        if name != "data":
            array[:] = nd.array([1.5, 0.5, 2.0]) + len(name)
    return executor


def check_symbol_is_the_symbol_of_mxnet() -> None:
    rows = _rows("uneven")
    whole, weights = _whole(sum(rows), 4), _weights(sum(rows), 4)
    for fix_gamma in (True, False):
        options = {"fix_gamma": fix_gamma, "eps": 1e-4, "momentum": 0.8, "name": "bn"}
        with mx.name.Prefix("net_"):
            synced = mx.sym.contrib.PerseusSyncBatchNorm(
                mx.sym.var("data"), comm_scope=1, key="k", ndev=4, **options
            )
            plain = mx.sym.BatchNorm(mx.sym.var("data"), **options)
        for what in ("list_arguments", "list_outputs", "list_auxiliary_states"):
            assert getattr(synced, what)() == getattr(plain, what)(), what
        synced = mx.sym.load_json(synced.tojson())
        ours = _executor(synced, _mine(whole, rows).shape)
        theirs = _executor(plain, whole.shape)
        for _ in range(2):
            for executor, part in ((ours, partial(_mine, rows=rows)), (theirs, lambda x: x)):
                executor.forward(is_train=True, data=nd.array(part(whole)))
                executor.backward(nd.array(part(weights)))
            _close(ours.outputs[0], _mine(theirs.outputs[0].asnumpy(), rows), 1e-5)
            for name, grad in ours.grad_dict.items():
                wanted = theirs.grad_dict[name].asnumpy()
                if name == "data":
                    _close(grad, _mine(wanted, rows), 1e-4)
                else:
                    _close(_sum(grad), wanted, 1e-4)
            for name, array in ours.aux_dict.items():
                _close(array, theirs.aux_dict[name], 1e-5)
        ours.forward(is_train=False, data=nd.array(_mine(whole, rows)))
        theirs.forward(is_train=False, data=nd.array(whole))
        _close(ours.outputs[0], _mine(theirs.outputs[0].asnumpy(), rows), 1e-5)


def check_arrays_and_outputs_of_mean_and_variance() -> None:
    rows = _rows("uneven")
    whole = _whole(sum(rows), 4)
    mean, variance = whole.mean((0, 2, 3)), whole.var((0, 2, 3))
    arrays = [nd.ones(CHANNELS), nd.zeros(CHANNELS), nd.zeros(CHANNELS), nd.ones(CHANNELS)]
    mine = nd.array(_mine(whole, rows))
    mine.attach_grad()
    layer = partial(mx.nd.contrib.PerseusSyncBatchNorm, comm_scope=1, key="arrays")
    with autograd.record():
        outputs = layer(mine, *arrays, output_mean_var=True, momentum=0.5)
    outputs[0].backward()
    shape = (1, CHANNELS, 1, 1)
    expected = (whole - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + 1e-3)
    for got, wanted in zip(outputs, (_mine(expected, rows), mean, variance), strict=True):
        _close(got, wanted, 2e-5)
    _close(arrays[2], mean / 2, 1e-5)
    _close(arrays[3], 0.5 + variance / 2, 1e-5)
    _close(mine.grad, np.zeros(mine.shape), 1e-4)
    symbol = mx.sym.contrib.PerseusSyncBatchNorm(name="bn", output_mean_var=True)
    assert symbol.list_outputs() == ["bn_output", "bn_joined_mean", "bn_joined_var"]


def check_inference_is_local_and_plain() -> None:
    """Rank 0 alone computes."""
    for options in ({}, {"use_global_stats": True}, {"scale": False}):
        layers = _layers("float32", "hybridised", **options)
        if hvd.rank() == 0:
            _compare_inference(layers, bool(options.get("use_global_stats")))
    synced, _ = _layers("float32", "plain")
    if hvd.rank() == 0:  # gradients of what was computed with running statistics
        values, weights = nd.array(_whole(4, 4)), nd.array(_weights(4, 4))
        values.attach_grad()
        with autograd.record(train_mode=False):
            output = synced(values)
        output.backward(weights)
        _close(values.grad, weights / np.sqrt(1 + 1e-5), 1e-5)


def _compare_inference(layers: tuple[Any, Any], trains: bool) -> None:
    batch, weights = _whole(4, 4), _weights(4, 4)
    results = []
    for layer in layers:
        layer.cast("float32")
        layer(nd.array(batch))
        layer.running_mean.set_data(nd.array([0.5, -6.0, 2.0]))
        layer.running_var.set_data(nd.array([2.0, 20.0, 0.1]))
        with autograd.record(), autograd.pause():
            outputs = [layer(nd.array(batch))]
        with autograd.predict_mode():
            outputs.append(layer(nd.array(batch)))
        if trains:
            outputs += _step(layer, batch, weights, "float32")
        results.append([*outputs, layer.running_mean.data(), layer.running_var.data()])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours.asnumpy(), theirs.asnumpy())


def check_training_mode_without_recording() -> None:
    rows = _rows("uneven")
    whole = _whole(sum(rows), 4)
    synced, _ = _layers("float32", "plain")
    for _ in range(3):
        with autograd.pause(train_mode=True):
            output = synced(nd.array(_mine(whole, rows)))
    middle = whole.mean((0, 2, 3), keepdims=True)
    expected = (whole - middle) / np.sqrt(whole.var((0, 2, 3), keepdims=True) + 1e-5)
    _close(output, _mine(expected, rows), 2e-5)
    _close(synced.running_mean.data(), middle.ravel() * (1 - 0.9**3), 1e-5)


def check_a_network_trains_as_one_process_does() -> None:
    rows = _rows("uneven")
    networks = []
    for kind in (partial(PerseusSyncBatchNorm, comm_scope=0), mx.gluon.nn.BatchNorm):
        network = mx.gluon.nn.HybridSequential(prefix=f"network{len(networks)}_")
        with network.name_scope():
            network.add(
                # So many channels have a layout of oneDNN's.
                mx.gluon.nn.Conv2D(24, 2), kind(), mx.gluon.nn.Activation("relu"),
                mx.gluon.nn.Conv2D(16, 1), kind(), mx.gluon.nn.Dense(2),
            )  # fmt: skip
        mx.random.seed(3)
        network.initialize(mx.init.Xavier())
        network.hybridize()
        networks.append(network)
    # What one has computed in inference is weights and statistics of the other.
    path = Path(tempfile.gettempdir()) / f"perseus-{os.getpid()}.params"
    networks[1](nd.zeros((1, CHANNELS, 2, 5)))
    networks[1].save_parameters(str(path))
    networks[0].load_parameters(str(path))
    for step in range(5):
        whole = _whole(sum(rows), 4, step)
        for network, batch in zip(networks, (_mine(whole, rows), whole), strict=True):
            with autograd.record():
                loss = (network(nd.array(batch)) ** 2).sum()
            loss.backward()
            for name, parameter in sorted(network.collect_params().items()):
                if parameter.grad_req != "null":
                    grad = parameter.grad()
                    if network is networks[0]:
                        grad = hvd.allreduce(grad, op=hvd.Sum, name=name)
                    parameter.set_data(parameter.data() - 1e-3 * grad)
    ours, theirs = (network.collect_params().values() for network in networks)
    for left, right in zip(ours, theirs, strict=True):
        _close(left.data(), right.data(), 1e-4)
    networks[0].save_parameters(str(path))
    networks[1].load_parameters(str(path))
    path.unlink()
    batch = nd.array(_whole(3, 4))
    _close(networks[0](batch), networks[1](batch), 1e-5)


def check_arguments() -> None:
    for make in (PerseusSyncBatchNorm, mx.sym.contrib.PerseusSyncBatchNorm):
        assert "comm_scope=2): expected 0" in raised(ValueError, lambda m=make: m(comm_scope=2))
    layer = PerseusSyncBatchNorm(num_devices=4, prefix="mine_")
    assert isinstance(layer, mx.gluon.nn.BatchNorm)
    assert sorted(layer.collect_params()) == sorted(
        mx.gluon.nn.BatchNorm(prefix="mine_").collect_params()
    )
    assert hvd.PerseusSyncBatchNorm is PerseusSyncBatchNorm
    assert of_host() is hvd.global_process_set


def check_arrays_of_numpy_kind() -> None:
    rows = _rows("uneven")
    whole = _whole(sum(rows), 4)
    mx.npx.set_np()
    try:
        for form in ("plain", "hybridised"):
            synced, _ = _layers("float32", form)
            values = mx.np.array(_mine(whole, rows), dtype="float32")
            values.attach_grad()
            with autograd.record():
                output = synced(values)
                loss = output.sum()
            loss.backward()
            assert isinstance(output, mx.np.ndarray)
            middle = whole.mean((0, 2, 3), keepdims=True)
            spread = np.sqrt(whole.var((0, 2, 3), keepdims=True) + 1e-5)
            _close(output.as_nd_ndarray(), _mine((whole - middle) / spread, rows), 2e-5)
            _close(values.grad.as_nd_ndarray(), np.zeros(values.shape), 1e-4)
    finally:
        mx.npx.reset_np()
