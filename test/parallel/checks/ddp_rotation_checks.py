"""PERSEUS_DOWNSAMPLE_N_ELEMENTS under DistributedDataParallel: parameters are averaged in turn."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist
from c10d_checks import process_group
from ddp_gradient_checks import apart
from patterns import raised, world_with
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from turns import RATE, SHAPES, Simulation, slope

import perseus.torch.horovod as hvd
from perseus.torch.distributed import synchronize_parameters


class _Sloping(nn.Module):
    """Parameters whose gradients are this rank's slopes of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})

    def forward(self, step: int) -> torch.Tensor:
        return sum((p * slope(name, hvd.rank(), step)).sum() for name, p in self.values.items())


class _Training:
    def __init__(self, **options: object) -> None:
        self.model = DistributedDataParallel(_Sloping(), bucket_cap_mb=0.003, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.taken = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.taken).backward()
        self.optimizer.step()
        self.taken += 1

    def values(self) -> list[torch.Tensor]:
        return [self.model.module.values[name].detach() for name in SHAPES]

    def equal_everywhere(self) -> bool:
        flat = torch.cat([value.reshape(-1) for value in self.values()])
        everywhere = [torch.empty_like(flat) for _ in range(hvd.size())]
        dist.all_gather(everywhere, flat)
        return all(torch.equal(other, flat) for other in everywhere)


def check_parameters_are_those_of_a_simulation() -> None:
    for parts, form in (
        (2, {}),
        (3, {"gradient_as_bucket_view": True}),
        (8, {"static_graph": True}),
    ):
        with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=parts):
            training, simulation = _Training(**form), Simulation(parts, after=False)
            for _ in range(2 * parts + 1):
                training.step()
                simulation.step()
                simulation.expect(training.values(), 1e-5)
            assert not training.equal_everywhere()
            synchronize_parameters(training.model)
            assert training.equal_everywhere()


def check_backward_passes_without_exchange_take_no_turn() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training, simulation = _Training(), Simulation(2, after=False)
        for step in range(4):
            training.optimizer.zero_grad()
            with training.model.no_sync():
                (training.model(step) / 2).backward()
            with torch.no_grad():
                training.model(step)  # an evaluation on the way
            (training.model(step) / 2).backward()
            training.optimizer.step()
            simulation.step()
            simulation.expect(training.values(), 1e-5)


def check_steps_that_are_not_applied_move_nothing() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2, PERSEUS_ACCUMULATE_N_STEPS=3):
        training = _Training()
        for step in range(1, 7):
            before = copy.deepcopy(training.values())
            training.step()
            moved = any(
                not torch.equal(value, old)
                for value, old in zip(training.values(), before, strict=True)
            )
            assert moved == (step % 3 == 0)


def check_loaded_parameters_are_not_corrected() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _Training()
        for _ in range(3):
            training.step()
        file = io.BytesIO()
        synchronize_parameters(training.model)
        torch.save(training.model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        training.step()
        training.step()
        training.model.load_state_dict(saved)
        assert training.equal_everywhere()
        training.step()
        for name, value in zip(SHAPES, training.values(), strict=True):
            own = saved[f"module.values.{name}"] - RATE * slope(name, hvd.rank(), 5)
            assert torch.allclose(value, own, atol=1e-6), "its own step and nothing else"


def check_two_models_do_not_mix() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        first, second, simulation = _Training(), _Training(), Simulation(2, after=False)
        for value in second.values():
            value.fill_(50.0)
        for _ in range(5):
            first.step()
            second.step()
            simulation.step()
        simulation.expect(first.values(), 1e-5)
        simulation.expect([value - 50.0 for value in second.values()], 1e-4)


def check_ranks_of_one_host_stay_equal() -> None:
    """Nothing is left out inside a host: gradients are averaged there."""
    trained = []
    for parts in (1, 4):
        with world_with(PERSEUS_DOWNSAMPLE_N_ELEMENTS=parts), process_group():
            training = _Training()
            for _ in range(5):
                training.step()
                assert training.equal_everywhere()
            trained.append(training.values())
    for exact, rotated in zip(*trained, strict=True):
        assert (rotated - exact).abs().max() < 1e-5


def check_what_does_not_go_with_it_is_refused() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _Training()

        def train_unevenly() -> None:
            with Join([training.model]):
                training.step()

        assert "PERSEUS_DOWNSAMPLE_N_ELEMENTS" in raised(ValueError, train_unevenly)
        assert "pass the wrapper" in raised(
            TypeError, lambda: synchronize_parameters(training.model.module)
        )


def check_a_hook_of_the_script_takes_its_place() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _Training()
        training.model.register_comm_hook(None, default_hooks.allreduce_hook)
        for _ in range(3):
            training.step()
            assert training.equal_everywhere()
        synchronize_parameters(training.model)
        assert training.equal_everywhere()
