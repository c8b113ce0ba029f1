"""PERSEUS_DOWNSAMPLE_N_ELEMENTS under DistributedDataParallel: parameters are averaged in turn."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from c10d_checks import process_group
from ddp_checks import batches, network
from ddp_gradient_checks import apart, expect_freed
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

    def compute(self, scaled: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """A backward pass; return the loss."""
        self.model.zero_grad()
        loss = self.model(self.taken)
        (loss if scaled is None else scaled(loss)).backward()
        self.taken += 1
        return loss

    def step(self) -> None:
        self.compute()
        self.optimizer.step()

    def step_by_hand(self) -> None:
        """As the optimizer does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(parameter.grad, alpha=RATE)

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
            training, simulation = _Training(**form), Simulation(parts)
            for _ in range(2 * parts + 1):
                training.step()
                simulation.step()
                simulation.expect(training.values(), 1e-5)
            assert not training.equal_everywhere()
            synchronize_parameters(training.model)
            assert training.equal_everywhere()


def check_backward_passes_without_exchange_take_no_turn() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training, simulation = _Training(), Simulation(2)
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


def check_parameters_that_ddp_ignores_are_not_averaged() -> None:
    """Those of which it reduces the gradients itself, but later, are."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("own", "late", "first")})
        layers._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]
        model = DistributedDataParallel(
            layers,
            delay_all_reduce_named_params=[
                (f"late.{name}", p) for name, p in layers.late.named_parameters()
            ],
            param_to_hook_all_reduce=layers.first.weight,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(hvd.rank()))
        synchronize_parameters(model)
        mean = (hvd.size() - 1) / 2
        for name, layer in layers.items():
            expected = float(hvd.rank()) if name == "own" else mean
            assert all(torch.all(p == expected) for p in layer.parameters()), name


def check_complex_parameters_are_averaged_in_both_parts() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        module = nn.ParameterList([torch.zeros(5, 2, dtype=torch.complex64)])
        model = DistributedDataParallel(module)
        with torch.no_grad():
            module[0].fill_(complex(hvd.rank(), 2 * hvd.rank()))
        synchronize_parameters(model)
        mean = (hvd.size() - 1) / 2
        assert torch.all(module[0] == complex(mean, 2 * mean))


def check_a_copy_of_a_model_is_averaged_in_turn() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training, simulation = _Training(), Simulation(2)
        training.model = copy.deepcopy(training.model)
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=RATE)
        for _ in range(5):
            training.step()
            simulation.step()
            simulation.expect(training.values(), 1e-5)
        synchronize_parameters(training.model)
        assert training.equal_everywhere()


def check_the_turn_of_a_step_without_a_hook_comes_with_the_next_pass() -> None:
    """The script steps by hand, then by an optimizer, and by hand again."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3):
        training, simulation = _Training(), Simulation(3)
        for step in range(12):
            training.compute()
            simulation.expect(training.values(), 1e-5)  # with the turns of all steps before
            simulation.step()
            if 4 <= step < 8:
                training.optimizer.step()
                simulation.expect(training.values(), 1e-5)
            else:
                training.step_by_hand()


def check_a_gradient_scaler_may_skip_the_step_on_some_ranks() -> None:
    """It looks for infinite values in the gradients of this rank's host."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3):
        training, simulation = _Training(), Simulation(3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(12):  # rank 0 owes the turn of the last one
            skipping = {rank for rank in range(hvd.size()) if (step + rank) % 4 == 3}
            factor = float("inf") if hvd.rank() in skipping else 1.0
            training.compute(lambda loss, by=factor: scaler.scale(loss * by))
            simulation.expect(training.values(), 1e-5)
            scaler.step(training.optimizer)
            scaler.update()
            simulation.step(skipping)
            if hvd.rank() not in skipping:
                simulation.expect(training.values(), 1e-5)
        assert not training.equal_everywhere()
        synchronize_parameters(training.model)
        assert training.equal_everywhere()


def check_a_closure_may_compute_the_gradients() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=3):
        training, simulation = _Training(), Simulation(3)
        for _ in range(7):
            training.optimizer.step(training.compute)
            simulation.step()
            simulation.expect(training.values(), 1e-5)


def check_a_step_inside_a_backward_pass_takes_no_turn() -> None:
    """Which would change parameters that the pass still needs."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in batches(hvd.rank()):
            model.zero_grad()
            loss = model(batch).square().mean()
            loss.register_hook(lambda _: optimizer.step())
            loss.backward()
        synchronize_parameters(model)


def check_a_turn_follows_the_steps_of_all_optimizers() -> None:
    """Also after one optimizer has taken the place of two that are still there."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training, simulation = _Training(), Simulation(2)
        values = training.model.module.values
        two = [
            torch.optim.SGD([values[name] for name in names], lr=RATE)
            for names in (("w", "few"), ("b", "scale"))
        ]
        for step in range(8):
            training.compute()
            for optimizer in two if step < 4 else [training.optimizer]:
                optimizer.step()
            simulation.step()
            simulation.expect(training.values(), 1e-5)


def check_an_optimizer_may_step_two_models() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        first, second, simulation = _Training(), _Training(), Simulation(2)
        optimizer = torch.optim.SGD(
            [*first.model.parameters(), *second.model.parameters()], lr=RATE
        )
        for _ in range(5):
            first.compute()
            second.compute()
            optimizer.step()
            simulation.step()
            simulation.expect(first.values(), 1e-5)
            simulation.expect(second.values(), 1e-5)


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


def check_one_rank_may_load_what_it_has_saved() -> None:
    """While others have skipped the step, so that they still owe the turn."""
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        training = _Training()
        for _ in range(3):
            training.step()
        training.compute()
        if hvd.rank() == 0:
            training.optimizer.step()
            saved = copy.deepcopy(training.model.state_dict())
            training.model.load_state_dict(saved)
        dist.barrier()
        training.step()
        if hvd.rank() == 0:
            for name, value in zip(SHAPES, training.values(), strict=True):
                own = saved[f"module.values.{name}"] - RATE * slope(name, 0, 4)
                assert torch.allclose(value, own, atol=1e-6), "its own step and nothing else"
        training.step()
        synchronize_parameters(training.model)
        assert training.equal_everywhere()


def check_a_step_after_the_group_has_ended_takes_no_turn() -> None:
    with world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=1, PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        with process_group():
            training = _Training()
            training.compute()
        training.optimizer.step()
        for name, value in zip(SHAPES, training.values(), strict=True):
            assert torch.equal(value, -RATE * slope(name, hvd.rank(), 0))


def check_models_and_optimizers_are_freed() -> None:
    for settings in ({}, {"PERSEUS_DOWNSAMPLE_N_ELEMENTS": 2}):
        with apart(**settings):
            first, second = _Training(), _Training()
            optimizer = torch.optim.SGD(
                [*first.model.parameters(), *second.model.parameters()], lr=RATE
            )
            for _ in range(2):
                first.step()
                second.compute()
                optimizer.step()
            dist.barrier()
            parameters = [weakref.ref(value) for value in second.model.parameters()]
            gone = [weakref.ref(optimizer), weakref.ref(second.model), *parameters]
            del optimizer, second
            expect_freed(gone)
            gone = [weakref.ref(first.model)]
            optimizer = first.optimizer
            del first
            expect_freed(gone)
            optimizer.step()
            gone = [weakref.ref(optimizer)]
            del optimizer
            expect_freed(gone)


def check_two_models_do_not_mix() -> None:
    with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        first, second, simulation = _Training(), _Training(), Simulation(2)
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
