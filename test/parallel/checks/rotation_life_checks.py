"""Rotations that begin and end at different times: on some ranks only, and across worlds."""

from __future__ import annotations

import copy

import torch
from patterns import added, apart, assert_job_usable
from sloping_training import Training
from turns import Simulation
from worlds import next_world

import perseus.torch.horovod as hvd
from perseus.gradients import rotation


def _rotating(process_set: hvd.ProcessSet = hvd.global_process_set) -> Training:
    return Training(
        hvd.DistributedOptimizer, compression=hvd.Compression.rotate(2), process_set=process_set
    )


def _as_in_new_processes() -> None:
    """Forget the rotations of earlier checks, of which ranks may have made different numbers."""
    rotation._living.clear()
    rotation._made.clear()


def _assert_a_new_one_works() -> None:
    training, simulation = _rotating(), Simulation(2)
    for _ in range(5):
        training.step()
        simulation.step()
    simulation.expect(training.values(), 1e-5)
    hvd.synchronize_parameters()
    assert training.equal_everywhere()


def check_a_rank_without_optimizers_takes_part_in_synchronizing() -> None:
    with apart(HOROVOD_DYNAMIC_PROCESS_SETS=1), added([*range(hvd.size() - 1)]) as (members,):
        _as_in_new_processes()
        training = None
        if members.included():
            training = _rotating(members)
            for _ in range(3):
                training.step()
        hvd.synchronize_parameters()
        if training is not None:
            gathered = hvd.allgather(training.values()[0].reshape(1, -1), process_set=members)
            assert all(torch.equal(row, gathered[0]) for row in gathered)
        assert_job_usable()


def check_ranks_may_collect_garbage_at_different_times() -> None:
    with apart():
        old = _rotating()
        old.step()
        kept = [old] if hvd.rank() == hvd.size() - 1 else []
        del old
        next_world()
        assert bool(kept) == (hvd.rank() == hvd.size() - 1)
        _assert_a_new_one_works()


def check_a_new_process_knows_nothing_of_earlier_optimizers() -> None:
    with apart():
        _as_in_new_processes()
        if hvd.rank() != 0:
            _rotating()
            earlier = _rotating()
        next_world()
        _assert_a_new_one_works()
        if hvd.rank() != 0:
            assert all(not value.any() for value in earlier.values())


def check_a_new_world_synchronizes_what_has_not_stepped_in_it() -> None:
    _as_in_new_processes()
    with apart():
        first, second = _rotating(), _rotating()
        for _ in range(2):
            second.step()
            second.step()
            first.step()
        next_world()
        assert not first.equal_everywhere()
        hvd.synchronize_parameters()
        assert first.equal_everywhere() and second.equal_everywhere()


def check_a_rank_that_joined_before_the_first_step_synchronizes() -> None:
    _as_in_new_processes()
    with apart():
        training = _rotating()
        for _ in range(0 if hvd.rank() == 0 else 3):
            training.step()
        hvd.join()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()


def check_a_removed_process_set_is_left_alone() -> None:
    with apart(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        with added([0], [*range(1, hvd.size())]) as sets:
            (members,) = (process_set for process_set in sets if process_set.included())
            training = _rotating(members)
            for _ in range(3):
                training.step()
        before = copy.deepcopy(training.values())
        hvd.synchronize_parameters()
        for value, old in zip(training.values(), before, strict=True):
            assert torch.equal(value, old)
        hvd.broadcast_parameters(dict(training.parameters), root_rank=0)
        assert training.equal_everywhere()


def check_process_sets_that_overlap_have_names_of_their_own() -> None:
    """Rank 0 steps in all of them, the others in one."""
    if hvd.size() == 2:
        return  # two ranks have one pair, which is the global set
    pairs = [[0, rank] for rank in range(1, hvd.size())]
    with apart(HOROVOD_DYNAMIC_PROCESS_SETS=1), added(*pairs) as sets:
        mine = [process_set for process_set in sets if process_set.included()]
        trainings = [_rotating(process_set) for process_set in mine]
        for _ in range(3):
            for training in trainings:
                training.step()
        hvd.synchronize_parameters()
        for process_set, training in zip(mine, trainings, strict=True):
            gathered = hvd.allgather(training.values()[0].reshape(1, -1), process_set=process_set)
            assert torch.equal(gathered[0], gathered[1])
