"""PerseusSyncBatchNorm: batch normalisation over the joined batch of a host's ranks, or of all.

Importing this module adds mx.gluon.contrib.nn.PerseusSyncBatchNorm,
mx.sym.contrib.PerseusSyncBatchNorm and mx.nd.contrib.PerseusSyncBatchNorm. Ranks match layers by
name, in whatever order they run.
"""
# ruff: noqa: PLR0917, N803 - the signatures are MXNet's

from __future__ import annotations

from typing import Any

import mxnet as mx

from perseus.mxnet.sync_batch_norm_op import OP


class PerseusSyncBatchNorm(mx.gluon.nn.BatchNorm):  # type: ignore[misc]
    """Batch normalisation of axis 1 whose statistics, while training, are those of several ranks.

    in_channels: 0 = taken from the first input.
    comm_scope: 0 = the ranks of each host share statistics, 1 = all ranks do; else a ValueError.
    num_devices: accepted and ignored.
    The others: as for mx.gluon.nn.BatchNorm, equal on all ranks; parameters are saved and loaded as
        that layer's.

    Inputs of any floating dtype. Ranks may have batches of different sizes; a rank's weight is its
    number of values. The gradient of the input is that of the sum of all ranks' losses; gamma
    and beta get this rank's share of it. Running statistics move in the forward pass, by the
    variance of the joined batch without Bessel's correction, as in MXNet. In inference, and with
    use_global_stats, it is MXNet's own layer and does not communicate.
    Ranks match a layer by its prefix: create the same layers in the same order everywhere, or give
    `prefix`. The first training step with comm_scope 0 on several hosts creates process sets, so
    all ranks must take it.
    """

    def __init__(
        self,
        in_channels: int = 0,
        num_devices: int | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        comm_scope: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            1, momentum, epsilon, center, scale, use_global_stats,
            beta_initializer=beta_initializer, gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels, **kwargs,
        )  # fmt: skip
        del self._kwargs["axis"]
        self._kwargs["comm_scope"] = _checked_scope(comm_scope)

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """The normalised input, times gamma, plus beta. F: mx.nd, or mx.sym while it is traced."""
        arrays = [x, gamma, beta, running_mean, running_var]
        is_np = mx.util.is_np_array()
        if is_np:
            arrays = [array.as_nd_ndarray() for array in arrays]
        arrays[0] = _in_plain_layout(arrays[0])
        outputs = F.Custom(*arrays, op_type=OP, exchange=self.prefix, name="fwd", **self._kwargs)
        values = _in_plain_layout(outputs[0])
        return values.as_np_ndarray() if is_np else values


def symbol(
    data: Any = None,
    gamma: Any = None,
    beta: Any = None,
    moving_mean: Any = None,
    moving_var: Any = None,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    output_mean_var: bool = False,
    ndev: int = 1,
    key: str | None = None,
    comm_scope: int = 0,
    name: str | None = None,
    attr: Any = None,
) -> Any:
    """mx.sym.contrib.PerseusSyncBatchNorm: the layer as a Symbol.

    data … moving_var: Symbols; a missing one becomes a variable `<name>_gamma` and so on.
    output_mean_var: three outputs: the values, and mean and variance of the joined batch.
    ndev, key: accepted and ignored. The others: as for mx.sym.contrib.SyncBatchNorm.
    Ranks match layers by `name`. See the gluon layer for scope, dtypes and the rest.
    """
    name = mx.name.NameManager.current.get(name, OP.lower())
    given = {"data": data, "gamma": gamma, "beta": beta}
    given |= {"moving_mean": moving_mean, "moving_var": moving_var}
    for argument, value in given.items():
        if value is None:
            given[argument] = mx.sym.var(f"{name}_{argument}")
    # The current manager would put its prefix before the names again.
    with mx.name.NameManager():
        given["data"] = _in_plain_layout(given["data"], name=f"{name}_plain")
        outputs = mx.sym.Custom(
            **given, op_type=OP, exchange=name, eps=eps, momentum=momentum, fix_gamma=fix_gamma,
            use_global_stats=use_global_stats, comm_scope=_checked_scope(comm_scope),
            name=f"{name}_joined", attr=attr,
        )  # fmt: skip
        values = _in_plain_layout(outputs[0], name=name)
    return mx.sym.Group([values, outputs[1], outputs[2]]) if output_mean_var else values


def ndarray(
    data: Any,
    gamma: Any,
    beta: Any,
    moving_mean: Any,
    moving_var: Any,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    output_mean_var: bool = False,
    ndev: int = 1,
    key: str | None = None,
    comm_scope: int = 0,
    name: str | None = None,
) -> Any:
    """mx.nd.contrib.PerseusSyncBatchNorm: the layer's arithmetic on arrays; see `symbol`.

    Moves moving_mean and moving_var, (channels,), while training.
    name, key: by which ranks match the layer; layers without either must depend on each other.
    """
    outputs = mx.nd.Custom(
        _in_plain_layout(data), gamma, beta, moving_mean, moving_var,
        op_type=OP, exchange=name or key or "nd", eps=eps, momentum=momentum,
        fix_gamma=fix_gamma, use_global_stats=use_global_stats,
        comm_scope=_checked_scope(comm_scope),
    )  # fmt: skip
    values = _in_plain_layout(outputs[0])
    return [values, *outputs[1:]] if output_mean_var else values


def _in_plain_layout(array: Any, **options: Any) -> Any:
    """Copy an NDArray or Symbol, and its gradient, out of oneDNN's layout.

    MXNet 1.9 gives operators in Python a plain copy of these, whose memory it has already freed.
    """
    # This operation never works in place, where the memory would keep the layout.
    module = mx.nd if isinstance(array, mx.nd.NDArray) else mx.sym
    return module.slice_axis(array, axis=0, begin=0, end=None, **options)


def _checked_scope(comm_scope: int) -> int:
    if comm_scope not in {0, 1}:
        raise ValueError(
            f"[mxnet] PerseusSyncBatchNorm(comm_scope={comm_scope!r}): expected 0 (statistics of "
            f"this host's ranks) or 1 (of all ranks)"
        )
    return int(comm_scope)


mx.gluon.contrib.nn.PerseusSyncBatchNorm = PerseusSyncBatchNorm
mx.sym.contrib.PerseusSyncBatchNorm = symbol
mx.nd.contrib.PerseusSyncBatchNorm = ndarray
