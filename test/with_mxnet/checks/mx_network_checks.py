"""Two real hosts of two ranks each: shared memory inside, TCP between; see test_mx_hosts."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mx_host_checks import LOCAL, check_statistics_of_a_host_and_of_all
from mx_values import assert_equal, everyone, mine
from worlds import world_with

import perseus
import perseus.mxnet as hvd

__all__ = ["check_statistics_of_a_host_and_of_all"]

ELEMENTS = 1 << 18
BYTES = 4 * ELEMENTS


def check_the_launcher_has_placed_the_ranks() -> None:
    """Nobody plays anything: what goes to the other host goes over its network."""
    rank = hvd.rank()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (2 * LOCAL, LOCAL, 2)
    assert (hvd.local_rank(), hvd.cross_rank()) == (rank % LOCAL, rank // LOCAL)
    hvd.allreduce(mx.nd.ones((ELEMENTS,)))
    stats = perseus.stats()
    assert stats["tcp_bytes_sent"] > 0
    assert stats["shm_bytes_sent"] > 0


def _sent(**settings: object) -> float:
    """How many times a gradient's bytes this rank sends to the other host."""
    with world_with(PERSEUS_ALLREDUCE_DTYPE=1, **settings):
        store = hvd.create()
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=-1.0))
        store.init("weight", mx.nd.zeros((ELEMENTS,)))
        weight = mx.nd.zeros((ELEMENTS,))
        steps, total = 4, np.zeros(ELEMENTS)
        store.pull("weight", weight)
        weight.wait_to_read()
        store.barrier()  # the first weights have arrived everywhere
        before = perseus.stats()["tcp_bytes_sent"]
        for step in range(steps):
            store.push("weight", mine((ELEMENTS,), salt=step))
            total += everyone((ELEMENTS,), step).sum(axis=0)
        store.pull("weight", weight)
        assert_equal(weight, total)
        return (perseus.stats()["tcp_bytes_sent"] - before) / steps / BYTES


def check_what_goes_between_hosts() -> None:
    """PERSEUS_ALLREDUCE_MODE, LIGHT_2D_ALLREDUCE, LIGHT_HIERARCHICAL_THRESHOLD: who sends how much.

    docs/algorithms.md has the arithmetic, for H = 2 hosts of K = 2 ranks.
    """
    leads = hvd.local_rank() == 0
    for expected, settings in (
        (1 / 2, {}),  # its half, exchanged between two
        (1.0, {"PERSEUS_ALLREDUCE_MODE": 0}),  # a quarter to each of two, out and back
        (1.0, {"LIGHT_2D_ALLREDUCE": 0}),
        (1.0 if leads else 0.0, {"PERSEUS_ALLREDUCE_MODE": 1}),
        (1 / 2, {"LIGHT_HIERARCHICAL_THRESHOLD": BYTES}),
        (1.0, {"LIGHT_HIERARCHICAL_THRESHOLD": BYTES - 1}),
    ):
        found = _sent(**settings)
        assert abs(found - expected) < 0.05, (settings, found)
