"""Compression.rotate: each step averages an N-th of the parameters, one step late."""

from __future__ import annotations

import copy

import torch
from patterns import apart, assert_job_usable, assert_same, raised
from sloping_training import Training
from torch import nn
from turns import RATE, SHAPES, Simulation, slope
from worlds import next_world

import perseus
import perseus.torch.horovod as hvd


def rotating(compression: object, dtype: torch.dtype = torch.float32) -> Training:
    return Training(hvd.DistributedOptimizer, dtype, compression=compression)


def check_parameters_are_those_of_a_simulation() -> None:
    for parts in (2, 3, 8):
        with apart():
            training, simulation = rotating(hvd.Compression.rotate(parts)), Simulation(parts)
            for _ in range(2 * parts + 1):
                training.step()
                simulation.step()
                simulation.expect(training.values(), 1e-5)
            assert not training.equal_everywhere()


def check_gradients_may_be_synchronized_before_the_step() -> None:
    """Then the turn is taken there, because a gradient scaler may skip the step on one rank."""
    with apart():
        training, simulation = rotating(hvd.Compression.rotate(3)), Simulation(3, after=False)
        for step in range(7):
            training.compute()
            training.optimizer.synchronize()
            skipping = {rank for rank in range(hvd.size()) if (step + rank) % 4 == 3}
            if hvd.rank() not in skipping:
                with training.optimizer.skip_synchronize():
                    training.optimizer.step()
            simulation.step(skipping)
            simulation.expect(training.values(), 1e-5)


def check_lbfgs_is_refused() -> None:
    """Hosts would call its closure differently often."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=4):
        for compression in (hvd.Compression.settings, hvd.Compression.rotate(2)):
            model = nn.Linear(2, 1)
            text = raised(
                ValueError,
                lambda model=model, compression=compression: hvd.DistributedOptimizer(
                    torch.optim.LBFGS(model.parameters()), compression=compression
                ),
            )
            assert text.startswith("[rotate] torch.optim.LBFGS"), text


def check_the_setting_does_the_same() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=4):
        for compression in (hvd.Compression.settings, hvd.Compression.rotate()):
            training, simulation = rotating(compression), Simulation(4)
            for _ in range(6):
                training.step()
                simulation.step()
            simulation.expect(training.values(), 1e-5)


def check_the_setting_leaves_minima_and_maxima_exact() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=4):
        for op, combined in ((hvd.Min, torch.amin), (hvd.Max, torch.amax)):
            training = Training(hvd.DistributedOptimizer, op=op)
            for step in range(2):
                training.step()
                for name, parameter in training.parameters.items():
                    slopes = [slope(name, rank, step) for rank in range(hvd.size())]
                    expected = combined(torch.stack(slopes), 0).to(parameter.dtype)
                    assert_same(parameter.grad, expected)
            assert training.equal_everywhere()


def check_every_dtype_is_averaged() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
        with apart():
            training, simulation = rotating(hvd.Compression.rotate(2), dtype), Simulation(2)
            for _ in range(6):
                training.step()
                simulation.step()
            simulation.expect(training.values(), tolerance if dtype != torch.float64 else 1e-5)
            hvd.synchronize_parameters()
            assert training.equal_everywhere()


def check_synchronized_parameters_have_the_same_bits_everywhere() -> None:
    with apart():
        training, simulation = rotating(hvd.Compression.rotate(3)), Simulation(3)
        for _ in range(4):
            training.step()
            simulation.step()
        assert not training.equal_everywhere()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()
        for index, name in enumerate(SHAPES):
            corrected = [r[name] + p[name] for r, p in zip(
                simulation.replicas, simulation.pending, strict=True
            )]  # fmt: skip
            mean = torch.stack(corrected).mean(dim=0)
            assert (training.values()[index] - mean).abs().max() < 1e-5
        hvd.synchronize_parameters()  # of equal ones changes nothing but roundings
        training.step()
        assert not training.equal_everywhere()
    rotating(hvd.Compression.fp16).step()
    hvd.synchronize_parameters()  # nothing to do


def check_a_broadcast_leaves_nothing_to_correct() -> None:
    with apart():
        training = rotating(hvd.Compression.rotate(2))
        for _ in range(3):
            training.step()
        root = hvd.size() - 1
        hvd.broadcast_parameters(dict(training.parameters), root_rank=root)
        assert training.equal_everywhere()
        before = copy.deepcopy(training.values())
        training.step()
        for name, value, old in zip(SHAPES, training.values(), before, strict=True):
            own = old - RATE * slope(name, hvd.rank(), 3)
            assert torch.allclose(value, own, atol=1e-6), "its own step and nothing else"


def check_loaded_parameters_are_not_corrected() -> None:
    with apart():
        training = rotating(hvd.Compression.rotate(2))
        for _ in range(3):
            training.step()
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        for parameter in training.parameters.values():
            parameter.data.fill_(2.0)
        training.step()
        for name, value in zip(SHAPES, training.values(), strict=True):
            assert torch.allclose(value, 2.0 - RATE * slope(name, hvd.rank(), 3), atol=1e-6)


def check_only_an_nth_of_the_parameters_travels() -> None:
    count, parts = 400_000, 8
    with apart():
        parameter = nn.Parameter(torch.zeros(4000, 100))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.1),
            named_parameters=[("p", parameter)],
            compression=hvd.Compression.rotate(parts),
        )
        before, steps = perseus.stats()["shm_bytes_sent"], 40
        for _ in range(steps):
            parameter.sum().backward()
            optimizer.step()
        sent = (perseus.stats()["shm_bytes_sent"] - before) / steps
    exact = 2 * (hvd.size() - 1) / hvd.size() * 4 * count
    assert abs(sent - exact / parts) < 0.1 * exact / parts, (sent, exact)


def check_ranks_that_have_joined_do_not_pull_to_zero() -> None:
    with apart():
        training = rotating(hvd.Compression.rotate(2))
        for parameter in training.parameters.values():
            parameter.data.fill_(100.0)
        steps = 2 if hvd.rank() == 0 else 6
        for _ in range(steps):
            training.step()
        hvd.join()
        assert all(bool((value > 90).all()) for value in training.values())
        assert_job_usable()


def check_turns_are_the_same_again_after_join() -> None:
    with apart():
        training = rotating(hvd.Compression.rotate(4))
        for _ in range(2 if hvd.rank() == 0 else 3):
            training.step()
        hvd.join()
        for _ in range(6):
            training.step()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()


def check_ranks_of_one_host_stay_equal() -> None:
    """Nothing is left out inside a host: gradients are averaged there."""
    training, plain = rotating(hvd.Compression.rotate(4)), rotating(hvd.Compression.none)
    for _ in range(5):
        training.step()
        plain.step()
        assert training.equal_everywhere()
    for ours, expected in zip(training.values(), plain.values(), strict=True):
        assert (ours - expected).abs().max() < 1e-5


def check_survivors_begin_a_new_turn() -> None:
    with apart():
        training = rotating(hvd.Compression.rotate(4))
        weights = nn.ParameterDict(training.parameters)
        state = hvd.elastic.TorchState(optimizer=training.optimizer, weights=weights)
        training.step()
        state.commit()
        assert training.equal_everywhere()
        training.step()
        state.restore()
        next_world()
        state.sync()
        assert training.equal_everywhere()
        training.step()
        training.step()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()


def check_a_gradient_that_is_accumulated_moves_nothing() -> None:
    with apart(PERSEUS_ACCUMULATE_N_STEPS=3, PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = rotating(hvd.Compression.settings)
        for step in range(1, 7):
            before = copy.deepcopy(training.values())
            training.step()
            moved = any(
                not torch.equal(value, old)
                for value, old in zip(training.values(), before, strict=True)
            )
            assert moved == (step % 3 == 0)


def check_what_excludes_each_other_is_refused() -> None:
    with apart(PERSEUS_PARAMETER_CHECK_N_STEPS=5):
        text = raised(ValueError, lambda: rotating(hvd.Compression.rotate(2)))
        assert "cannot compare" in text
        rotating(hvd.Compression.fp16)


def check_a_step_that_one_rank_skips_does_not_shift_the_turns() -> None:
    """As a gradient scaler does it where the rank's own gradients have overflowed."""
    with apart():
        training = rotating(hvd.Compression.rotate(4))
        for step in range(6):
            training.optimizer.zero_grad()
            for name, parameter in training.parameters.items():
                (parameter * slope(name, hvd.rank(), step)).sum().backward()
            training.optimizer.synchronize()
            if not (step == 2 and hvd.rank() == 0):
                with training.optimizer.skip_synchronize():
                    training.optimizer.step()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()


def check_sparse_gradients_are_gathered_as_ever() -> None:
    with apart():
        embedding = nn.Embedding(20, 3, sparse=True)
        weight = embedding.weight
        weight.data.zero_()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            named_parameters=[("e", weight)],
            compression=hvd.Compression.rotate(2),
        )
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([hvd.rank(), 10])).sum().backward()
            optimizer.step()
        assert torch.allclose(weight[10], torch.full((3,), -3.0), atol=1e-5)
        for rank in range(hvd.size()):
            expected = torch.full((3,), -3.0 / hvd.size())
            assert torch.allclose(weight[rank], expected, atol=1e-5)


def check_two_models_with_the_same_names_do_not_mix() -> None:
    with apart():
        first, second = (rotating(hvd.Compression.rotate(2)) for _ in range(2))
        simulation = Simulation(2)
        for parameter in second.parameters.values():
            parameter.data.fill_(50.0)
        for _ in range(5):
            first.step()
            second.step()
            simulation.step()
        simulation.expect(first.values(), 1e-5)
        simulation.expect([value - 50.0 for value in second.values()], 1e-4)
        hvd.synchronize_parameters()
        assert first.equal_everywhere() and second.equal_everywhere()
