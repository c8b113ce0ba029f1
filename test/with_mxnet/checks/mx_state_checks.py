"""broadcast_parameters, broadcast_object, allgather_object."""

from __future__ import annotations

import copy
from importlib import import_module

import mxnet as mx
import numpy as np
from mx_training import assert_equal_on_all_ranks, model, raised, values_of
from mxnet import autograd, gluon

import perseus.mxnet as hvd


def _assert_roots(net: gluon.Block, root: int) -> None:
    """The weights that model() makes of the root's number."""
    for mine, right in zip(values_of(net), values_of(model(seed=root)), strict=True):
        assert np.array_equal(mine, right)


def check_parameters_become_the_roots() -> None:
    for root in range(hvd.size()):
        net = model(seed=hvd.rank())
        hvd.broadcast_parameters(net.collect_params(), root_rank=root)
        _assert_roots(net, root)
    net = model(seed=hvd.rank())
    arrays = {name: p.data() for name, p in net.collect_params().items()}
    hvd.broadcast_parameters(arrays, prefix="arrays.")
    _assert_roots(net, 0)


def check_dtypes_and_numpys_arrays() -> None:
    for dtype in ("float16", "float64", "int32", "uint8"):
        parameter = gluon.Parameter("p", shape=(3, 2), dtype=dtype, grad_req="null")
        parameter.initialize(mx.init.Constant(hvd.rank() + 1))
        array = mx.np.array([hvd.rank() + 7.0])
        hvd.broadcast_parameters({"p": parameter, "np": array}, root_rank=hvd.size() - 1)
        assert parameter.data().asnumpy().tolist() == [[hvd.size()] * 2] * 3
        assert parameter.data().dtype == np.dtype(dtype)
        assert array.asnumpy().tolist() == [hvd.size() + 6.0]


def _deferred() -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dense(2))
    net.initialize(mx.init.Normal(1.0))
    return net


def check_deferred_parameters_become_the_roots_when_they_are_there() -> None:
    mx.random.seed(20 + hvd.rank())
    for hybrid in (False, True):
        net = _deferred()
        net.hybridize(active=hybrid)
        hvd.broadcast_parameters(net.collect_params())
        hvd.broadcast_parameters(net.collect_params())  # a script may do it once too often
        copied = copy.deepcopy(net)
        for one in (net, copied):
            with autograd.record():
                one(mx.nd.ones((2, 3)))
            own = values_of(one)
            assert len(own) == 8
            assert_equal_on_all_ranks(own)
            assert all(np.isfinite(value).all() for value in own)
            assert "_init_impl" not in vars(next(iter(one.collect_params().values())))
        different = [
            a for a, b in zip(values_of(net), values_of(copied), strict=True) if (a != b).any()
        ]
        assert different, "one has got the other's weights"


def check_weights_loaded_on_the_root_reach_deferred_ones() -> None:
    net = gluon.nn.Dense(2)
    net.initialize()
    hvd.broadcast_parameters(net.collect_params())
    if hvd.rank() == 0:
        net.weight._load_init(mx.nd.array([[1.0, 2.0], [3.0, 4.0]]), None)
    net(mx.nd.ones((1, 2)))
    assert net.weight.data().asnumpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def check_after_an_inference_mode_forward() -> None:
    """Which leaves weights of convolutions in a layout of oneDNN's."""
    mx.random.seed(40 + hvd.rank())
    for hybrid in (False, True):
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(32, 3, in_channels=16), gluon.nn.Conv2D(16, 3, in_channels=32))
        net.add(gluon.nn.Dense(8))
        net.initialize(mx.init.Normal(0.5))
        net.hybridize(active=hybrid)
        images = mx.nd.ones((2, 16, 9, 9))
        own = net(images).asnumpy()
        weights = [parameter.data().copy().asnumpy() for parameter in net.collect_params().values()]
        roots = hvd.broadcast_object((weights, own), name="of the root")
        net(images).wait_to_read()
        hvd.broadcast_parameters(net.collect_params())
        for mine, right in zip(values_of(net), roots[0], strict=True):
            assert np.array_equal(mine, right)
        np.testing.assert_allclose(net(images).asnumpy(), roots[1], rtol=1e-5, atol=1e-4)


def check_what_cannot_be_broadcast() -> None:
    message = raised(ValueError, lambda: hvd.broadcast_parameters([mx.nd.ones((1,))]))
    assert "invalid params of type" in message
    dense = gluon.nn.Dense(1, in_units=1)
    message = raised(RuntimeError, lambda: hvd.broadcast_parameters(dense.collect_params()))
    assert "has not been initialized" in message


def check_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "numbers": np.arange(rank + 3)}
    for root in range(size):
        got = hvd.broadcast_object(mine, root_rank=root)
        assert got["rank"] == root and got["numbers"].tolist() == list(range(root + 3))
        assert (got is mine) == (root == rank)
    assert hvd.broadcast_object("x" * rank if rank else [1], name="of any type") == [1]
    gathered = hvd.allgather_object(mine)
    assert [found["rank"] for found in gathered] == list(range(size))
    assert [len(found["numbers"]) for found in gathered] == [r + 3 for r in range(size)]


def check_scripts_find_it_under_horovods_name() -> None:
    import perseus.compat.horovod  # noqa: F401 - from here on

    horovod = import_module("horovod.mxnet")
    assert horovod is hvd
    for name in ("compression", "functions", "mpi_ops"):
        assert import_module(f"horovod.mxnet.{name}") is getattr(hvd, name)
    assert import_module("horovod.common.util").extension_available("mxnet")
    hvd.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", hvd.__file__, "mpi_lib")
    sets = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    assert sets == {0: list(range(hvd.size()))}
    assert hvd.split_list([1, 2, 3], 2) == [[1, 2], [3]]
