"""Two hosts of two ranks each, which one machine plays: who shares statistics, who sends what."""

from __future__ import annotations

import os

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_sync_batch_norm_checks import CHANNELS, _close, _mine, _step, _weights, _whole
from mx_training import raised
from mxnet.gluon.contrib.nn import PerseusSyncBatchNorm

import perseus.mxnet as hvd
from perseus.gradients.plan import Plan
from perseus.mxnet.reducer import GradientReducer
from perseus.process_sets import of_host

LOCAL = 2


def check_ranks_have_places_on_two_hosts() -> None:
    """The others go on in this world."""
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    for product in ("HOROVOD", "PERSEUS"):
        for name, place in (
            ("LOCAL_RANK", rank % LOCAL),
            ("LOCAL_SIZE", LOCAL),
            ("CROSS_RANK", rank // LOCAL),
            ("CROSS_SIZE", size // LOCAL),
        ):
            os.environ[f"{product}_{name}"] = str(place)
    hvd.init()
    assert (hvd.local_rank(), hvd.local_size()) == (rank % LOCAL, LOCAL)
    assert (hvd.cross_rank(), hvd.cross_size()) == (rank // LOCAL, size // LOCAL)
    assert hvd.create().local_rank == rank % LOCAL


def _rows() -> list[int]:
    return [3 * rank + 1 for rank in range(hvd.size())]


def _host() -> slice:
    """The rows of this host's ranks in the joined batch."""
    rows, first = _rows(), hvd.cross_rank() * LOCAL
    begin = sum(rows[:first])
    return slice(begin, begin + sum(rows[first : first + LOCAL]))


def _of_one_process(part: slice, steps: int) -> list[np.ndarray]:
    """(output, gradient of the input, running mean, running variance) of MXNet's own layer."""
    plain = mx.gluon.nn.BatchNorm(in_channels=CHANNELS)
    plain.initialize()
    plain.cast("float64")
    for step in range(steps):
        batch, weights = _whole(sum(_rows()), 4, step)[part], _weights(sum(_rows()), 4, step)[part]
        output, gradient = _step(plain, batch, weights, "float64")
    # What is of this rank, of the rows of `part`.
    mine = _mine(np.arange(sum(_rows())), _rows()) - part.start
    found = [output.asnumpy()[mine], gradient.asnumpy()[mine]]
    return found + [array.data().asnumpy() for array in (plain.running_mean, plain.running_var)]


def check_statistics_of_a_host_and_of_all() -> None:
    """Several steps of both kinds of layer; hybridised ones, too."""
    steps, everybody = 3, slice(0, sum(_rows()))
    for hybrid in (False, True):
        for scope, part in ((0, _host()), (1, everybody)):
            layer = PerseusSyncBatchNorm(comm_scope=scope, in_channels=CHANNELS)
            layer.initialize()
            layer.hybridize(active=hybrid)
            for step in range(steps):
                batch, weights = (
                    _mine(make(sum(_rows()), 4, step), _rows()) for make in (_whole, _weights)
                )
                output, gradient = _step(layer, batch, weights, "float32")
            found = [output, gradient, layer.running_mean.data(), layer.running_var.data()]
            for got, wanted in zip(found, _of_one_process(part, steps), strict=True):
                _close(got, wanted, 2e-5)
    first = hvd.cross_rank() * LOCAL
    assert of_host().ranks == list(range(first, first + LOCAL))


def check_scripts_may_add_and_remove_the_sets_of_hosts() -> None:
    with settings.world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        hosts = [[0, 1], [2, 3]]
        for _ in range(2):
            assert of_host().ranks == hosts[hvd.cross_rank()]
            added = hvd.add_process_set([0, 1])
            if hvd.rank() in added.ranks:
                assert of_host() is added
            assert "duplicate" in raised(ValueError, lambda: hvd.add_process_set([0, 1]))
            assert hvd.remove_process_set(added)
        # The next use makes it again.
        total = hvd.allreduce(mx.nd.ones((1,)), op=hvd.Sum, process_set=of_host())
        assert total.asscalar() == LOCAL


def _error(members: hvd.ProcessSet) -> float:
    """The largest in a sum over a set's ranks of gradients that need all of their digits."""
    gradients = [mx.nd.array(array) for array in settings.normal(hvd.rank(), 0)]
    reducer = GradientReducer(Plan(op=hvd.Sum, process_set=members))
    reducer(gradients, ["large", "small"])
    everybody = [settings.normal(rank, 0) for rank in members.ranks]
    return max(
        np.abs(gradient.asnumpy() - sum(array.astype(np.float64) for array in arrays)).max()
        for gradient, *arrays in zip(gradients, *everybody, strict=True)
    )


def check_half_precision_is_for_what_goes_between_groups() -> None:
    """PERSEUS_ALLREDUCE_DTYPE=2, with groups as LIGHT_2D_ALLREDUCE and LIGHT_INTRA_SIZE make them.

    The core itself sees that all ranks are on one machine.
    """
    groups = {"LIGHT_2D_ALLREDUCE": 1, "LIGHT_INTRA_SIZE": LOCAL}
    with settings.world_with(PERSEUS_ALLREDUCE_DTYPE=1, **groups):
        assert _error(hvd.global_process_set) < 1e-5
    with settings.world_with(PERSEUS_ALLREDUCE_DTYPE=2, **groups):
        assert 1e-5 < _error(hvd.global_process_set) < 0.02
        assert _error(of_host()) < 1e-5
