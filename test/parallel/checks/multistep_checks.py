"""Sums over steps, the search for NaN and for slow ranks, as a training script meets them."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path

import torch
from patterns import nan_check, raised, stderr_lines, world_with
from torch import nn

import perseus.torch.horovod as hvd
from perseus.errors import NanGradientError


def _accumulate(steps: int) -> dict[str, object]:
    return {"PERSEUS_ACCUMULATE_N_STEPS": steps}


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.rand(4, 6, generator=generator)).square().mean()


def _reference(model: nn.Module, first: int, count: int) -> list[torch.Tensor]:
    """The mean over ranks of the sums of some steps' gradients."""
    model.zero_grad()
    for rank in range(hvd.size()):
        for step in range(first, first + count):
            (_loss(model, step, rank) / hvd.size()).backward()
    return [p.grad.clone() for p in model.parameters()]


def _sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def _named(optimizer: torch.optim.Optimizer, model: nn.Module, **options: object):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def _close(model: nn.Module, reference: nn.Module) -> None:
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def _train(steps: int, sum_of: int, passes: int = 1, clip: float = 0.0, **options: object) -> None:
    """Against plain steps on reference gradients, while the script zeroes gradients every step."""
    model = _model()
    reference = copy.deepcopy(model)
    optimizer = _named(_sgd(model, momentum=0.9), model, backward_passes_per_step=passes, **options)
    plain = _sgd(reference, momentum=0.9)
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        for part in range(passes):
            _loss(model, step * passes + part, hvd.rank()).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if step % sum_of != sum_of - 1:
            for p, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(p, old), "a step was taken before its time"
            continue
        gradients = _reference(reference, (step + 1 - sum_of) * passes, sum_of * passes)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            if not clip:
                torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-6)
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        plain.step()
        _close(model, reference)


def check_a_sum_of_steps_is_one_step_on_the_average_of_sums() -> None:
    with world_with(**_accumulate(3)):
        _train(steps=9, sum_of=3)


def check_backward_passes_per_step_multiply() -> None:
    with world_with(**_accumulate(2)):
        _train(steps=4, sum_of=2, passes=3)


def check_groups_and_clipping() -> None:
    with world_with(**_accumulate(2)):
        _train(steps=4, sum_of=2, groups=2)
        _train(steps=4, sum_of=2, clip=0.01)
        _train(steps=4, sum_of=2, gradient_predivide_factor=2.0)


def check_compression_travels_and_the_sum_is_right() -> None:
    with world_with(**_accumulate(2)):
        model = _model()
        optimizer = _named(_sgd(model), model, compression=hvd.Compression.fp16)
        reference = _reference(copy.deepcopy(model), 0, 2)
        for step in range(2):
            optimizer.zero_grad()
            _loss(model, step, hvd.rank()).backward()
            optimizer.step()
        for p, gradient in zip(model.parameters(), reference, strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, gradient, rtol=5e-3, atol=1e-4)


def check_a_parameter_may_take_the_place_of_another_between_sums() -> None:
    def take_steps() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            ((kept.sum() + changing.sum()) * (hvd.rank() + 1)).backward()
            optimizer.step()

    with world_with(**_accumulate(2)):
        kept, changing = (nn.Parameter(torch.zeros(size)) for size in (2, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([kept, changing], lr=1.0))
        for before, size in enumerate((3, 4, 4)):
            changing = optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(size))
            take_steps()
            for parameter, rounds in ((kept, before + 1), (changing, 1)):
                moved = rounds * 4 * (hvd.size() + 1) / 2
                assert torch.equal(parameter.detach(), torch.full_like(parameter, -moved))


def check_a_scheduler_counts_the_scripts_steps() -> None:
    with world_with(**_accumulate(2)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = _named(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            scheduler.step()
        # Steps with the second and the fourth rate, on sums of two.
        assert model.weight.item() == -(0.5 * 2 + 0.125 * 2)


def check_a_layer_without_gradient_in_some_step_keeps_its_part_of_the_sum() -> None:
    with world_with(**_accumulate(2)):
        model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
        optimizer = _named(_sgd(model), model, op=hvd.Sum)
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[1](torch.full((1, 2), 3.0)).sum().backward()
        model[1].requires_grad_(False)
        optimizer.step()
        assert torch.equal(model[0].weight.grad, torch.full((1, 2), float(hvd.size())))
        assert torch.equal(model[1].weight.grad, torch.full((1, 2), 3.0 * hvd.size()))


def check_a_checkpoint_in_the_midst_of_a_sum() -> None:
    with world_with(**_accumulate(2)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = _named(_sgd(model, momentum=0.9), model, op=hvd.Sum)

        def step(scale: float) -> None:
            optimizer.zero_grad()
            (model(torch.ones(1, 1)).sum() * scale).backward()
            optimizer.step()

        step(1.0)
        step(2.0)
        saved = copy.deepcopy(optimizer.state_dict())
        weight = model.weight.detach().clone()
        step(4.0)
        # What state_dict() sees is the wrapped optimizer's, whose last step is the one before.
        momentum = saved["state"][0]["momentum_buffer"]
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
        optimizer.load_state_dict(saved)
        step(8.0)
        assert torch.equal(model.weight, weight), "the sum starts anew"
        step(16.0)
        assert model.weight.grad.item() == 24.0 * hvd.size(), "without the 4 of before"


def check_a_closure_runs_in_every_step() -> None:
    with world_with(**_accumulate(2)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = _named(_sgd(model), model)
        before = model.weight.detach().clone()
        model(torch.ones(1, 1)).sum().backward()
        assert optimizer.step(lambda: 1.5) == 1.5
        assert torch.equal(model.weight, before)
        model(torch.ones(1, 1)).sum().backward()
        assert optimizer.step(lambda: 2.5) == 2.5
        assert not torch.equal(model.weight, before)


def check_gradients_that_a_closure_computes_are_summed_over_steps() -> None:
    with world_with(**_accumulate(2)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = _named(_sgd(model), model, op=hvd.Sum)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("step"))

        def closure(scale: float) -> float:
            optimizer.zero_grad()
            (model(torch.ones(1, 1)).sum() * scale * (hvd.rank() + 1)).backward()
            return scale

        ranks = sum(range(1, hvd.size() + 1))
        for step, scale in enumerate((1.0, 2.0, 4.0, 8.0)):
            before = model.weight.detach().clone()
            assert optimizer.step(lambda scale=scale: closure(scale)) == scale
            total = {1: 3.0, 3: 12.0}.get(step, 0.0) * ranks
            torch.testing.assert_close(model.weight.detach(), before - 0.1 * total)
        assert calls == ["step"] * 2


def check_two_optimizers_with_equal_names_take_turns() -> None:
    with world_with(**_accumulate(2)):
        models = [nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)]
        optimizers = [_named(_sgd(model), model, op=hvd.Sum) for model in models]
        for _ in range(2):
            for scale, model, optimizer in zip((1.0, 10.0), models, optimizers, strict=True):
                optimizer.zero_grad()
                (model(torch.ones(1, 2)).sum() * scale).backward()
                optimizer.step()
        assert models[0].weight.grad.tolist() == [[2.0 * hvd.size()] * 2]
        assert models[1].weight.grad.tolist() == [[20.0 * hvd.size()] * 2]


def check_a_new_optimizer_knows_nothing_of_the_old_ones_sums() -> None:
    with world_with(**_accumulate(2)):
        model = nn.Linear(2, 1, bias=False)
        for scale in (1.0, 5.0):
            optimizer = _named(_sgd(model), model, op=hvd.Sum)
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * scale).backward()
            optimizer.step()
            if scale == 1.0:
                del optimizer
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * 5.0).backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[10.0 * hvd.size()] * 2]


def check_other_operations_are_not_held() -> None:
    with world_with(**_accumulate(4), **nan_check("raise")):
        mine = torch.tensor([float(hvd.rank()), float("nan")])
        total = hvd.allreduce(mine, op=hvd.Sum, name="metric")
        assert total[0].item() == sum(range(hvd.size()))


def check_adasum_of_optimizers_is_refused() -> None:
    with world_with(**_accumulate(2)):
        model = _model()
        text = raised(ValueError, lambda: _named(_sgd(model), model, op=hvd.Adasum))
        assert "PERSEUS_ACCUMULATE_N_STEPS sums gradients, but op=Adasum" in text


class _Training:
    """Two layers; in one step the last rank's second one has a NaN."""

    def __init__(self, **options: object) -> None:
        self.model = _model()
        self.optimizer = _named(_sgd(self.model, momentum=0.9), self.model, **options)

    def backward(self, bad: bool) -> None:
        self.optimizer.zero_grad()
        loss = _loss(self.model, 0, hvd.rank())
        if bad and hvd.rank() == hvd.size() - 1:
            loss = loss + self.model[2].bias[1] * float("nan")
        loss.backward()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def check_nan_is_reported_with_tensor_and_rank_on_all_ranks() -> None:
    with world_with(**nan_check("report")):
        training = _Training()
        for bad in (False, True):
            with stderr_lines() as lines:
                training.backward(bad)
                training.optimizer.synchronize()
                # Known before step().
                with training.optimizer.skip_synchronize():
                    training.optimizer.step()
            told = [line for line in lines if "[nancheck]" in line]
            assert bool(told) == bad, lines
            if bad:
                expected = f"NaN in the gradient of allreduce.2.bias on rank {hvd.size() - 1}"
                assert any(expected in line for line in told), told
        assert training.model[2].bias.isnan().any()


def check_nan_raises_on_all_ranks() -> None:
    with world_with(**nan_check("raise")):
        training = _Training()
        training.backward(bad=False)
        training.optimizer.step()
        before = training.weights()
        training.backward(bad=True)
        text = raised(NanGradientError, training.optimizer.step)
        assert f"NaN in the gradient of allreduce.2.bias on rank {hvd.size() - 1}" in text
        assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
        training.backward(bad=False)
        training.optimizer.step()
        assert not any(w.isnan().any() for w in training.weights())


def check_nan_skips_the_step_on_all_ranks() -> None:
    with world_with(**nan_check("skip")):
        training = _Training(groups=2)
        for bad in (False, True, False):
            before = training.weights()
            with stderr_lines() as lines:
                training.backward(bad)
                training.optimizer.step()
            same = [torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True)]
            assert all(same) if bad else not any(same), (bad, same)
            assert any("this step is skipped" in line for line in lines) == bad, lines
        for name, p in training.model.named_parameters():
            rows = hvd.allgather(p.detach().unsqueeze(0), name=f"equal.{name}")
            assert not rows.isnan().any()
            assert all(torch.equal(row, rows[0]) for row in rows)


def check_nan_in_an_early_step_is_found_in_the_sum() -> None:
    with world_with(**_accumulate(2), **nan_check("skip")):
        training = _Training()
        before = training.weights()
        for bad in (True, False):
            training.backward(bad)
            training.optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
        for _ in range(2):
            training.backward(bad=False)
            training.optimizer.step()
        assert not any(w.isnan().any() for w in training.weights())


def check_a_slow_rank_is_named_on_rank_0() -> None:
    slow, steps = hvd.size() - 1, 6
    with (
        tempfile.TemporaryDirectory() as mine,
        world_with(PERSEUS_PERF_CHECK_N_STEPS=2),
        stderr_lines() as lines,
    ):
        directory = Path(hvd.broadcast_object(mine, 0, "directory"))
        model = _model()
        optimizer = _named(_sgd(model), model)
        for step in range(steps):
            began = time.monotonic()
            optimizer.zero_grad()
            loss = _loss(model, step, hvd.rank())
            if hvd.rank() == slow:
                _compute_longer(directory, [f"{step}.{rank}" for rank in range(slow)], began)
            loss.backward()
            (directory / f"{step}.{hvd.rank()}").touch()
            optimizer.step()
        hvd.barrier()
    told = [line for line in lines if "[perf check] slow in the last 2 steps" in line]
    if hvd.rank() == 0:
        assert any(f" rank {slow} " in line.partition("for each:")[2] for line in told), lines
    else:
        assert not told, told


def _compute_longer(directory: Path, others: list[str], began: float) -> None:
    """Four times as long as the others took until they wait, however busy the machine is."""
    while not all((directory / name).exists() for name in others):
        pass
    enough = max(4 * (time.monotonic() - began), 0.02)
    while time.monotonic() - began < enough:
        pass
