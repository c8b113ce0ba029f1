"""The state of LocalSGD and DiLoCo: what is saved, lost, skipped, broadcast or begun anew."""

from __future__ import annotations

import copy
import gc
import itertools

import torch
from local_replicas import Replicas
from local_training import (
    global_parameters,
    kinds,
    rounding,
    same,
)
from patterns import apart, assert_job_usable, nan_check, raised
from sloping_training import Training, Wrap, equal_everywhere
from torch import nn
from turns import RATE, SHAPES
from worlds import next_world

import perseus.torch.horovod as hvd


def check_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted() -> None:
    for inner in (torch.optim.SGD, torch.optim.Adam):
        for wrap, options in kinds():
            saved, expected = _interrupted(wrap, inner, options)
            gc.collect()  # so that the names of exchanges, to which residuals belong, are free
            same(_resumed(wrap, inner, options, saved), expected)
            gc.collect()


def _interrupted(
    wrap: Wrap, inner: Wrap, options: dict[str, object]
) -> tuple[dict[str, object], list[torch.Tensor]]:
    """Return what is saved after 6 steps, with an average under way, and parameters after 15."""
    with apart():
        training = Training(wrap, inner=inner, **options)
        for _ in range(6):
            training.step()
        saved = training.saved()
        for _ in range(9):
            training.step()
        return saved, training.values()


def _resumed(
    wrap: Wrap, inner: Wrap, options: dict[str, object], saved: dict[str, object]
) -> list[torch.Tensor]:
    with apart():
        training = Training(wrap, inner=inner, **options)
        training.load(saved)
        training.taken = 6
        for _ in range(9):
            training.step()
        return training.values()


def check_a_checkpoint_of_one_rank_serves_all() -> None:
    for wrap, options in kinds():
        with apart():
            training = Training(wrap, **options)
            for _ in range(6):
                training.step()
            hvd.synchronize_parameters()
            saved, root = training.saved(), hvd.size() - 1
            for _ in range(8):
                training.step()
            expected = copy.deepcopy(training.values())
            resumed = Training(wrap, **options)
            if hvd.rank() == root:
                resumed.load(saved)
            hvd.broadcast_parameters(dict(resumed.parameters), root_rank=root)
            hvd.broadcast_optimizer_state(resumed.optimizer, root_rank=root)
            resumed.taken = 6
            for _ in range(8):
                resumed.step()
            # Residuals of int8 belong to their ranks and stay behind.
            same(resumed.values(), expected, 0.1 if wrap is hvd.DiLoCo else 0)
            if wrap is hvd.DiLoCo:
                assert equal_everywhere(global_parameters(resumed))


def check_state_of_another_optimizer_begins_anew() -> None:
    with apart():
        plain = Training(hvd.DistributedOptimizer, compression=hvd.Compression.none)
        plain.step()
        training, replicas = Training(hvd.LocalSGD, every=2), Replicas(2, delay=1)
        training.step()
        training.load(plain.saved())
        replicas.start(plain.values())
        training.taken = replicas.taken = 1
        for _ in range(5):
            training.step()
            replicas.step()
        same(training.values(), replicas.mine(), rounding())


def check_post_local_sgd_goes_on_with_the_same_parameters() -> None:
    with apart():
        training = Training(hvd.DistributedOptimizer, compression=hvd.Compression.none)
        for _ in range(3):
            training.step()
        state, parameters = training.optimizer.state_dict(), training.parameters
        del training.optimizer
        gc.collect()
        replicas = Replicas(2, delay=1)
        replicas.start(training.values())
        training.optimizer = hvd.LocalSGD(
            torch.optim.SGD(parameters.values(), lr=RATE), parameters.items(), every=2
        )
        training.optimizer.load_state_dict(state)
        replicas.taken = 3
        for _ in range(5):
            training.step()
            replicas.step()
        same(training.values(), replicas.mine(), rounding())


def check_a_broadcast_gives_diloco_its_first_parameters() -> None:
    with apart():
        options = {"every": 4, "delay": 0, "compression": hvd.Compression.none}
        training = Training(hvd.DiLoCo, outer_lr=0.5, outer_momentum=0.5, **options)
        replicas = Replicas(4, 1, 0, outer=(0.5, 0.5))
        replicas.start([torch.full_like(value, 8.0) for value in training.values()])
        for value in training.values():
            value.fill_(float(8 + hvd.rank()))
        hvd.broadcast_parameters(dict(training.parameters), root_rank=0)
        for _ in range(9):
            training.step()
            replicas.step()
        same(training.values(), replicas.mine(), rounding())


def check_all_ranks_may_load_what_one_has_saved() -> None:
    """Only that one goes on with what int8 held back of its outer gradients."""
    with apart():
        training = Training(hvd.DiLoCo, every=2, delay=0)
        for _ in range(4):
            training.step()
        saved = hvd.broadcast_object(training.optimizer.state_dict(), root_rank=0)
        held = saved["perseus_local_steps"]["residuals"]
        assert held
        resumed = Training(hvd.DiLoCo, every=2, delay=0)
        resumed.optimizer.load_state_dict(saved)
        state = resumed.optimizer.state_dict()["perseus_local_steps"]
        assert state["residuals"].keys() == (held.keys() if hvd.rank() == 0 else set())
        assert state["step"] == 4


def check_a_step_that_one_rank_skips_does_not_shift_the_turns() -> None:
    """As a gradient scaler does it where the host's own gradients have overflowed."""
    for wrap, options in kinds():
        for skipped in (3, 4, 7):  # 7 is the last one
            with apart():
                training = Training(wrap, **options)
                for step in range(8):
                    training.compute()
                    training.optimizer.synchronize()
                    if not (step == skipped and hvd.rank() == 0):
                        with training.optimizer.skip_synchronize():
                            training.optimizer.step()
                hvd.synchronize_parameters()
                assert training.equal_everywhere()
                if wrap is hvd.DiLoCo:
                    assert equal_everywhere(global_parameters(training))


def check_a_nan_that_is_skipped_is_no_step() -> None:
    for wrap, options in ((hvd.LocalSGD, {"every": 2}), (hvd.DiLoCo, {"every": 2})):
        with apart(**nan_check("skip")):
            training = Training(wrap, **options)
            for step in range(7):
                training.compute(float("nan") if step == 3 and hvd.rank() == 0 else 1.0)
                training.optimizer.step()
            assert all(bool(value.isfinite().all()) for value in training.values())
            hvd.synchronize_parameters()
            assert training.equal_everywhere()


def check_ranks_that_have_joined_do_not_pull_to_zero() -> None:
    for wrap, options in kinds():
        with apart():
            training = Training(wrap, **options)
            for parameter in training.parameters.values():
                parameter.data.fill_(100.0)
            for _ in range(6 if hvd.rank() == 0 else 12):
                training.step()
            hvd.join()
            assert all(bool((value > 80).all()) for value in training.values())
            assert_job_usable()


def check_ranks_go_on_with_the_steps_of_the_last_one_to_join() -> None:
    for wrap, options in kinds():
        with apart():
            training = Training(wrap, **options)
            for _ in range(6 if hvd.rank() == 0 else 12):
                training.step()
            last = hvd.join()
            hvd.broadcast_parameters(dict(training.parameters), root_rank=last)
            training.step()
            state = training.optimizer.state_dict()["perseus_local_steps"]
            assert state["step"] == 13
            if wrap is hvd.DiLoCo:
                assert equal_everywhere(global_parameters(training))


def check_survivors_go_on_with_the_outer_state() -> None:
    """After a failure, and as they are when hosts have come, with ranks that load a checkpoint."""
    for (wrap, options), fails in itertools.product(kinds(), (True, False)):
        with apart():
            training = Training(wrap, **options)
            weights = nn.ParameterDict(training.parameters)
            state = hvd.elastic.TorchState(optimizer=training.optimizer, weights=weights)
            for _ in range(3):
                training.step()
            checkpoint = copy.deepcopy(training.optimizer.state_dict())
            for _ in range(3):
                training.step()
            state.commit()
            assert training.equal_everywhere()
            committed = copy.deepcopy(training.optimizer.state_dict()["perseus_local_steps"])
            training.step()
            training.step()
            if fails:
                state.restore()
            next_world()
            if hvd.rank() == hvd.size() - 1:  # as a rank that comes new
                nothing = {**training.optimizer.state_dict(), "perseus_local_steps": None}
                training.optimizer.load_state_dict(nothing if fails else checkpoint)
            state.sync()
            assert training.equal_everywhere()
            training.step()
            after = training.optimizer.state_dict()["perseus_local_steps"]
            assert after["step"] == committed["step"] + (1 if fails else 3)
            for _ in range(5):
                training.step()
            if wrap is hvd.DiLoCo:
                assert equal_everywhere(global_parameters(training))
            hvd.synchronize_parameters()
            assert training.equal_everywhere()


def check_state_of_another_model_is_refused() -> None:
    with apart():
        training = Training(hvd.DiLoCo, every=2)
        training.step()
        parameters = [nn.Parameter(torch.zeros(3)) for _ in SHAPES]
        other = hvd.DiLoCo(torch.optim.SGD(parameters, lr=RATE), every=2)
        text = raised(ValueError, lambda: other.load_state_dict(training.optimizer.state_dict()))
        assert "other shapes" in text
