"""Normalisation of a batch by statistics of several ranks, as an operator of MXNet's graphs.

Ranks add up counts, sums and sums of squares in float64: one allreduce in a forward pass while
training, one in its backward pass. Each is waited for by a thread of MXNet's for such operators.
"""
# ruff: noqa: PLR0917 - the signatures are MXNet's

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from perseus import basics
from perseus.mxnet import ops
from perseus.process_sets import global_process_set, of_host

# The op_type that saved graphs have: importing this module is what loading them takes.
OP = "PerseusSyncBatchNorm"
# Threads for such operators, made when there is work for them: enough for all exchanges that a
# network may have under way, as they need not come in the same order on all ranks. Default: 16.
os.environ.setdefault("MXNET_CUSTOM_OP_NUM_THREADS", "512")


class _Layer:
    """What this rank knows of the uses of one layer: forward passes, each with its backward pass.

    Several backward passes of a layer may be under way (two inputs, one loss), in another order on
    another rank, so they are numbered by their forward passes, which are in the script's order: the
    running statistics are theirs. Numbers begin again where no rank has a use open, as the forward
    exchange tells; so in a usual training loop there is one name, which the core remembers.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # collecting garbage inside of it may end a use
        self.open = 0  # uses whose backward pass has not been handed to the engine
        self.last: _Use | None = None
        # The sums of each number: the engine lets one use have them after the other.
        self.sums: dict[int, Any] = {}

    def begin(self) -> _Use:
        """A new use; the forward pass of the last one is over."""
        with self.lock:
            before = -1 if self.last is None else self.last.number
            self.last = _Use(self, self.open, before)
            self.open += 1
            return self.last


class _Use:
    """One forward pass of a layer in training, up to its backward pass."""

    def __init__(self, layer: _Layer, others: int, before: int) -> None:
        self.layer, self.others, self._before = layer, others, before
        self.number = 0  # the same on all ranks
        self._is_open = True

    def agree(self, others: float | None) -> None:
        """others: of all ranks together; None where the exchange has failed."""
        if others is None:
            self.layer.sums.clear()
        elif others:
            self.number = self._before + 1

    def end(self) -> None:
        """The backward pass is with the engine, or will not come."""
        with self.layer.lock:
            self.layer.open -= self._is_open
            self._is_open = False


_layers: dict[str, _Layer] = {}
basics.at_init(_layers.clear)


class _Normalise(mx.operator.CustomOp):  # type: ignore[misc]
    """One layer in one graph; called on MXNet's threads for such operators."""

    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self._settings = settings
        self._use: _Use | None = None
        self._mean: Any = None
        self._variance: Any = None
        self._count: Any = None

    def __del__(self) -> None:
        if self._use is not None:
            self._use.end()

    def forward(
        self,
        is_train: bool,
        req: list[str],
        in_data: list[Any],
        out_data: list[Any],
        aux: list[Any],
    ) -> None:
        """Called by MXNet: the outputs, and in training the running statistics."""
        (data, gamma, beta), running = _plain(in_data), _plain(aux)
        if self._use is not None:
            self._use.end()
            self._use = None
        if is_train and not self._settings.use_global_stats:
            self._join(data, gamma, beta)
            momentum = self._settings.momentum
            for moved, new in zip(running, (self._mean, self._variance), strict=True):
                moved[:] = momentum * moved + (1 - momentum) * new
        else:
            # What MXNet passes is there for this call only.
            self._mean, self._variance = (array.copy() for array in running)
        gamma = self._settings.gamma(gamma)
        values = self._normalised(data, gamma, beta)
        for output, how, result in zip(
            _plain(out_data), req, (values, self._mean, self._variance), strict=True
        ):
            self.assign(output, how, result)

    def backward(
        self, req: list[str], out_grad: list[Any], in_data: list[Any], out_data: list[Any],
        in_grad: list[Any], aux: list[Any],
    ) -> None:  # fmt: skip
        """Called by MXNet: the gradients of data, gamma and beta."""
        data, gamma = (array.detach() for array in _plain(in_data[:2]))
        gamma = self._settings.gamma(gamma)
        arrays = [data, gamma, nd.zeros_like(gamma)]
        grads = [nd.empty(array.shape, array.context, array.dtype) for array in arrays]
        autograd.mark_variables(arrays, grads)
        # With given statistics; what these depend on comes after.
        with autograd.record():
            values = self._normalised(*arrays)
        values.backward(_plain(out_grad[:1])[0])
        of_data, of_gamma, of_beta = grads
        if self._use is not None and req[0] != "null":
            with autograd.pause():
                of_data = of_data + self._through_statistics(data, gamma, of_gamma, of_beta)
        if self._use is not None:
            self._use.end()
        if self._settings.fix_gamma:
            of_gamma = nd.zeros_like(of_gamma)
        for target, how, result in zip(
            _plain(in_grad), req, (of_data, of_gamma, of_beta), strict=True
        ):
            self.assign(target, how, result)

    def _normalised(self, data: Any, gamma: Any, beta: Any) -> Any:
        return nd.BatchNorm(
            data, gamma, beta, self._mean, self._variance,
            eps=self._settings.eps, fix_gamma=False, use_global_stats=True,
        )  # fmt: skip

    def _join(self, data: Any, gamma: Any, beta: Any) -> None:
        """Mean, variance and number of values of the joined batch."""
        eps = self._settings.eps
        spare = [nd.zeros_like(gamma), nd.zeros_like(gamma)]
        # MXNet's kernel for the statistics is several times as fast as its reductions.
        with autograd.train_mode():
            _, mean, scale = nd.BatchNorm(
                data, gamma, beta, *spare, eps=eps, fix_gamma=False, output_mean_var=True
            )
        layer = _layers.setdefault(self._settings.exchange, _Layer())
        use = self._use = layer.begin()
        count = data.size // gamma.size
        mean = mean.astype("float64")
        variance = nd.maximum(scale.astype("float64") ** -2 - eps, 0)
        # Sums of squares lose nothing in float64, of which float32 values take half the digits.
        head = nd.array([use.others, count], data.context, "float64")
        row = nd.concat(head, mean * count, (variance + mean**2) * count, dim=0)
        use.agree(self._allreduce(row, "forward"))
        self._count = row[1:2].copy()
        mean, squares = _halves(nd.broadcast_div(row[2:], self._count))
        self._mean = mean.astype(gamma.dtype)
        self._variance = nd.maximum(squares - mean**2, 0).astype(gamma.dtype)

    def _through_statistics(self, data: Any, gamma: Any, of_gamma: Any, of_beta: Any) -> Any:
        """What the gradient of all ranks' outputs by mean and variance adds to the data's."""
        assert self._use is not None
        number = self._use.number
        own = nd.concat(of_gamma, of_beta, dim=0).astype("float64")
        sums = self._use.layer.sums.setdefault(number, nd.zeros_like(own))
        sums[:] = own
        self._allreduce(sums, "backward" if number == 0 else f"backward.{number}")
        products, totals = _halves(nd.broadcast_div(sums, self._count).astype(gamma.dtype))
        factor = -gamma * (self._variance + self._settings.eps) ** -0.5
        return self._normalised(data, factor * products, factor * totals)

    def _allreduce(self, row: Any, direction: str) -> float | None:
        """Waits; the first of the sums, or None where this fails, as everything made of them."""
        name = f"sync_batch_norm.{self._settings.exchange}.{direction}"
        group = of_host() if self._settings.comm_scope == 0 else global_process_set
        exchange = partial(ops.allreduce, [row], [row], name, op=ops.Sum, process_set=group)
        exchange()
        # What this thread pushes afterwards takes some of its few buffers for temporary values, and
        # would keep other layers from beginning, which other ranks may be waiting for.
        try:
            return float(row[:1].copy().asscalar())
        except mx.base.MXNetError:
            # Who waits for an error takes it from all arrays that have it. All ranks fail once
            # more, for the script to see.
            exchange()
            return None


def _plain(arrays: list[Any]) -> list[Any]:
    """mx.np.ndarray as NDArray."""
    return [array.as_nd_ndarray() for array in arrays]


def _halves(row: Any) -> tuple[Any, Any]:
    middle = row.size // 2
    return row[:middle], row[middle:]


@mx.operator.register(OP)
class _Settings(mx.operator.CustomOpProp):  # type: ignore[misc]
    """The op as MXNet's graphs know it. Arguments are text: where it was saved too."""

    def __init__(
        self,
        exchange: str,
        eps: str,
        momentum: str,
        fix_gamma: str,
        use_global_stats: str,
        comm_scope: str,
    ) -> None:
        super().__init__()
        self.exchange, self.comm_scope = exchange, int(comm_scope)
        self.eps, self.momentum = float(eps), float(momentum)
        self.fix_gamma, self.use_global_stats = fix_gamma == "True", use_global_stats == "True"

    def gamma(self, given: Any) -> Any:
        """The factor that counts."""
        return nd.ones_like(given) if self.fix_gamma else given

    def list_arguments(self) -> list[str]:
        """See CustomOpProp, as for the rest."""
        return ["data", "gamma", "beta"]

    def list_outputs(self) -> list[str]:
        """With the statistics that the values were normalised with."""
        return ["output", "mean", "var"]

    def list_auxiliary_states(self) -> list[str]:
        """As MXNet calls them."""
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape: list[Any]) -> Any:
        """One number per channel."""
        data = in_shape[0]
        channels = [data[1]] if len(data) > 1 else None
        if channels is None:
            raise ValueError(
                f"[mxnet] PerseusSyncBatchNorm got data of the shape {tuple(data)}: expected "
                f"(batch, channels, …)"
            )
        return [data, channels, channels], [data, channels, channels], [channels, channels]

    def infer_type(self, in_type: list[Any]) -> Any:
        """Parameters of float16 data are float32."""
        data = in_type[0]
        own = np.float64 if np.dtype(data) == np.float64 else np.float32
        return [data, own, own], [data, own, own], [own, own]

    def declare_backward_dependency(
        self, out_grad: list[int], in_data: list[int], out_data: list[int]
    ) -> list[int]:
        """Outputs need not be kept."""
        return [out_grad[0], *in_data[:2]]

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Normalise:
        """For one graph, or one call outside of graphs."""
        return _Normalise(self)
