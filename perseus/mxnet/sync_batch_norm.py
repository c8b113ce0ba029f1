"""PerseusSyncBatchNorm: batch normalisation over the joined batch of a host's ranks, or of all.

MXNet has it, once this module is imported, as mx.gluon.contrib.nn.PerseusSyncBatchNorm,
mx.sym.contrib.PerseusSyncBatchNorm and mx.nd.contrib.PerseusSyncBatchNorm. Ranks pair layers by
name, in whatever order they run.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from perseus.mxnet.joined_batch import OP


class PerseusSyncBatchNorm(mx.gluon.nn.BatchNorm):  # type: ignore[misc]
    """Batch normalisation of axis 1 whose statistics, while training, are those of several ranks.

    in_channels: 0 = found out from the first input.
    comm_scope: 0 = the ranks of this host share statistics, 1 = all ranks do; else a ValueError.
    num_devices: accepted and ignored.
    The others: as for mx.gluon.nn.BatchNorm, equal on all ranks; parameters are saved and loaded as
        that layer's.

    Inputs of any floating dtype; ranks may have batches of different sizes, and weigh as many
    values as they have. The gradient of the input is that of the sum of all ranks' losses; gamma
    and beta get this rank's share of it. Running statistics move in the forward pass, by the
    variance of the joined batch without Bessel's correction, as in MXNet. In inference, and with
    use_global_stats, it is MXNet's own layer and does not communicate.
    Ranks pair a layer by its prefix: make the same layers in the same order everywhere, or give
    `prefix`. The first training step with comm_scope 0 on several hosts makes process sets: it has
    to be one that all ranks take.
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
        outputs = F.Custom(
            *arrays, op_type=OP, exchange=self.prefix, name="fwd", **self._kwargs
        )
        return outputs[0].as_np_ndarray() if is_np else outputs[0]


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

    data … moving_var: Symbols; what is missing becomes a variable `<name>_gamma` and so on.
    output_mean_var: three outputs: the values, and mean and variance of the joined batch.
    ndev, key: accepted and ignored. The others: as for mx.sym.contrib.SyncBatchNorm.
    Ranks pair layers by `name`. See the gluon layer for scope, dtypes and the rest.
    """
    name = mx.name.NameManager.current.get(name, OP.lower())
    given = {"data": data, "gamma": gamma, "beta": beta}
    given |= {"moving_mean": moving_mean, "moving_var": moving_var}
    # The manager that is current would put its prefix before the name again.
    with mx.name.NameManager():
        outputs = mx.sym.Custom(
            **{argument: value for argument, value in given.items() if value is not None},
            op_type=OP, exchange=name, eps=eps, momentum=momentum, fix_gamma=fix_gamma,
            use_global_stats=use_global_stats, comm_scope=_checked_scope(comm_scope),
            name=name, attr=attr,
        )  # fmt: skip
    return outputs if output_mean_var else outputs[0]


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
    name, key: what ranks pair the layer by; layers without either must depend on each other.
    """
    outputs = mx.nd.Custom(
        data, gamma, beta, moving_mean, moving_var,
        op_type=OP, exchange=name or key or "nd", eps=eps, momentum=momentum,
        fix_gamma=fix_gamma, use_global_stats=use_global_stats,
        comm_scope=_checked_scope(comm_scope),
    )  # fmt: skip
    return outputs if output_mean_var else outputs[0]


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
