"""Compression.rotate on four ranks: hosts of two ranks each, and process sets."""

from __future__ import annotations

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_replicas import RATE, SHAPES, WAYS, Simulation, Training, assert_same_bits, slope

import perseus.mxnet as hvd
from perseus import control

LOCAL = 2


def check_hosts_step_with_the_gradients_of_their_own_ranks() -> None:
    """A store's sums are as large as those of all ranks."""
    for way in WAYS:
        with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3, LIGHT_INTRA_SIZE=LOCAL):
            training, simulation = Training(way), Simulation(3, way, LOCAL)
            for step in range(6):
                training.step()
                simulation.step()
                assert_same_bits(training.values(), simulation.mine(), (way, step))
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
            assert_same_bits(training.values(), simulation.corrected_mean(), way)


def check_a_process_set_averages_among_its_ranks() -> None:
    """Two sets with a common rank, which has a trainer for each; the others have one or none."""
    groups = [[0, 1], [1, 3]]
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2, HOROVOD_DYNAMIC_PROCESS_SETS=1):
        found = []
        sets = [hvd.add_process_set(ranks) for ranks in groups]
        for members in sets:
            parameter = mx.gluon.Parameter("w", shape=SHAPES["w"])
            parameter.initialize(mx.init.Zero())
            trainer = hvd.DistributedTrainer(
                [parameter], "sgd", {"learning_rate": RATE}, process_set=members
            )
            for step in range(4):
                with mx.autograd.record():
                    given = mx.nd.array(slope("w", hvd.rank(), step))
                    loss = (parameter.data() * given).sum()
                loss.backward()
                trainer.step(1)
            found.append((parameter, trainer))
        hvd.synchronize_parameters()
        for ranks, (parameter, _) in zip(groups, found, strict=True):
            ranks = ranks if hvd.rank() in ranks else [hvd.rank()]  # noqa: PLW2901
            total = [slope("w", rank, step) for rank in ranks for step in range(4)]
            expected = -RATE * np.sum(total, axis=0) / len(ranks)
            assert_same_bits([parameter.data().asnumpy()], [expected.astype(np.float32)], ranks)
        before = [parameter.data().asnumpy() for parameter, _ in found]
        hvd.remove_process_set(sets[0])
        hvd.synchronize_parameters()
        after = [parameter.data().asnumpy() for parameter, _ in found]
        assert_same_bits(after, before)
        control.barrier()
    with settings.apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        hvd.synchronize_parameters()  # nothing has taken a step in this world
        training = Training("trainer")
        training.step()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()
        assert_same_bits([parameter.data().asnumpy() for parameter, _ in found], before)
