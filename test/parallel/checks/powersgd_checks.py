"""Compression.powersgd: between hosts, gradients travel as products of narrow matrices."""

from __future__ import annotations

import copy

import gradient_settings as settings
import numpy as np
import torch
from ddp_gradient_checks import apart as apart_with_process_group
from gradient_settings import apart
from patterns import assert_job_usable, raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import perseus
import perseus.torch.horovod as hvd

SHAPES = {"linear": (48, 80), "conv": (32, 16, 3, 3), "bias": (48,)}
KEY = "perseus_residuals"
_SETTING = {
    "PERSEUS_ALLREDUCE_CODEC": "powersgd",
    "PERSEUS_POWERSGD_RANK": 8,
    "PERSEUS_ALLREDUCE_DTYPE": 1,
}


def _gradient(name: str, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator)


class _Training:
    def __init__(self, compression: object, **options: object) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(s)) for name, s in SHAPES.items()}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=1.0),
            named_parameters=self.parameters.items(),
            compression=compression,
            op=hvd.Sum,
            **options,
        )

    def step(self, step: int) -> dict[str, torch.Tensor]:
        """The sums by which the optimizer has stepped."""
        self.optimizer.zero_grad()
        for name, parameter in self.parameters.items():
            (parameter * _gradient(name, hvd.rank(), step)).sum().backward()
        self.optimizer.step()
        return {name: parameter.grad.clone() for name, parameter in self.parameters.items()}

    def held(self) -> dict[str, object]:
        return self.optimizer.state_dict().get(KEY, {})


def _produced(name: str, steps: int) -> torch.Tensor:
    return sum(
        _gradient(name, rank, step).double() for rank in range(hvd.size()) for step in range(steps)
    )


def _assert_nothing_missing(results: list[dict[str, torch.Tensor]]) -> None:
    for name in SHAPES:
        total = sum(result[name].double() for result in results)
        assert (total - _produced(name, len(results))).abs().max() < 1e-3, name


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def _named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]


def check_the_setting() -> None:
    def reduce(steps: list[settings.Arrays]) -> list[settings.Arrays]:
        parameters = [nn.Parameter(torch.zeros(array.shape)) for array in steps[0]]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0), named_parameters=_named(parameters),
            op=hvd.Sum,
        )  # fmt: skip
        results = []
        for arrays in steps:
            optimizer.zero_grad()
            for parameter, array in zip(parameters, arrays, strict=True):
                (parameter * torch.from_numpy(array)).sum().backward()
            optimizer.step()
            results.append([parameter.grad.numpy().copy() for parameter in parameters])
        return results

    settings.powersgd(reduce)


def check_the_argument_is_the_rank() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        expected = [_Training(hvd.Compression.powersgd(2)).step(0)]
        matrix = expected[0]["conv"].reshape(32, 144)
        assert np.linalg.matrix_rank(matrix.double().numpy(), tol=1e-3) == 2
        assert torch.allclose(expected[0]["bias"].double(), _produced("bias", 1), atol=1e-5)
    with apart(
        PERSEUS_ALLREDUCE_DTYPE=1, PERSEUS_ALLREDUCE_CODEC="powersgd", PERSEUS_POWERSGD_RANK=2
    ):
        for compression in (hvd.Compression.settings, hvd.Compression.powersgd()):
            _assert_same(_Training(compression).step(0), expected[0])


def check_the_first_steps_are_exact() -> None:
    """On all ranks as long as one of them is in its first steps, or has joined."""
    with apart(PERSEUS_POWERSGD_WARMUP_STEPS=3, PERSEUS_ALLREDUCE_DTYPE=1):
        training = _Training(hvd.Compression.powersgd(2))
        for step in range(2):
            for name, total in training.step(step).items():
                exact = sum(_gradient(name, rank, step) for rank in range(hvd.size()))
                assert torch.allclose(total, exact, atol=1e-5), (step, name)
            assert not training.held()
        steps = 3 if hvd.rank() == 0 else 5
        results = {step: training.step(step) for step in range(2, steps)}
        hvd.join()
        for step, result in results.items():
            ranks = range(0 if step < 3 else 1, hvd.size())
            exact = sum(_gradient("conv", rank, step) for rank in ranks)
            assert torch.allclose(result["conv"], exact, atol=1e-5), step
        # Rank 0 has had its three steps, too, and all are there.
        matrix = training.step(9)["conv"].reshape(32, 144)
        assert np.linalg.matrix_rank(matrix.double().numpy(), tol=1e-3) == 2
    with apart(PERSEUS_POWERSGD_WARMUP_STEPS=1, PERSEUS_ALLREDUCE_DTYPE=1):
        training = _Training(hvd.Compression.powersgd(2))
        if hvd.rank() != 0:
            training.step(0)
        hvd.join()
        exact = sum(_gradient("linear", rank, 1) for rank in range(hvd.size()))
        assert torch.allclose(training.step(1)["linear"], exact, atol=1e-5), "rank 0's first"


def check_a_flush_sends_all_that_is_held() -> None:
    with apart():
        training = _Training(hvd.Compression.powersgd(4))
        training.step(0)
        hvd.flush_residuals()
        results = [training.step(3)]
        assert not training.held()
        results += [training.step(step) for step in (4, 5)]
        hvd.flush_residuals()
        results.append(training.step(6))
        for name in SHAPES:
            exact = sum(_gradient(name, r, s) for r in range(hvd.size()) for s in (4, 5, 6))
            total = sum(result[name] for result in results[1:])
            assert torch.allclose(total, exact, atol=1e-3 if name != "bias" else 0.1), name


def check_few_bytes_travel() -> None:
    with apart():
        training = _Training(hvd.Compression.powersgd(2))
        training.step(0)
        before, steps = perseus.stats()["shm_bytes_sent"], 20
        for step in range(steps):
            training.step(step)
        sent = (perseus.stats()["shm_bytes_sent"] - before) / steps
    narrow = 4 * 2 * (48 + 80 + 32 + 144) + 2 * 48
    expected = (hvd.size() - 1) * narrow  # so few that each rank sends them to all others
    assert expected <= sent < 1.5 * expected, (sent, expected)


def check_groups_of_gradients_are_the_same_sums() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        training = _Training(hvd.Compression.powersgd(4), groups=1)
        results = [training.step(step) for step in range(4)]
        hvd.flush_residuals()
        results.append(training.step(4))
        _assert_nothing_missing(results)
        assert not training.held()


def check_a_checkpoint_has_what_this_rank_holds() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        training = _Training(hvd.Compression.powersgd(2))
        results = [training.step(step) for step in range(3)]
        saved = copy.deepcopy(training.optimizer.state_dict())
        assert saved[KEY]
        resumed = _Training(hvd.Compression.powersgd(2))
        resumed.optimizer.load_state_dict(saved)
        results.append(resumed.step(3))  # flushes, because the vectors are not in the checkpoint
        _assert_nothing_missing(results)
        before = len(results)
        results += [resumed.step(step) for step in range(before, before + 2)]
        assert resumed.held()
        hvd.flush_residuals()
        results.append(resumed.step(before + 2))
        _assert_nothing_missing(results)


def check_a_change_of_codec_sends_all_that_is_held() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        x = _gradient("linear", hvd.rank(), 0)
        total = torch.zeros(x.shape, dtype=torch.float64)
        powersgd = hvd.Compression.powersgd
        for compression in (powersgd(1), powersgd(1), powersgd(3), hvd.Compression.int8):
            total += hvd.allreduce(x, op=hvd.Sum, name="x", compression=compression)
        missing = (total - 4 * _produced("linear", 1)).abs().max()
        assert missing > 1e-3, "int8 holds something back"
        total += hvd.allreduce(x, op=hvd.Sum, name="x", compression=powersgd(1))
        assert (total - 5 * _produced("linear", 1)).abs().max() < 1e-3
        total += hvd.allreduce(x, op=hvd.Sum, name="x")
        assert (total - 6 * _produced("linear", 1)).abs().max() < 1e-3


def check_a_nan_comes_out_everywhere_and_does_not_stay() -> None:
    with apart():
        x = _gradient("linear", hvd.rank(), 0)
        bad = x.clone()
        if hvd.rank() == hvd.size() - 1:
            bad[3, 5] = torch.nan
        powersgd = hvd.Compression.powersgd(2)
        assert hvd.allreduce(x, name="x", compression=powersgd).isfinite().all()
        assert hvd.allreduce(bad, name="x", compression=powersgd).isnan().all()
        assert hvd.allreduce(x, name="x", compression=powersgd).isfinite().all()


def check_ranks_that_have_joined_add_nothing() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        training = _Training(hvd.Compression.powersgd(4))
        training.step(0)
        if hvd.rank() != 0:
            result = training.step(1)["bias"].double()
            expected = sum(_gradient("bias", rank, 1).double() for rank in range(1, hvd.size()))
            assert torch.allclose(result, expected, atol=1e-5)
            assert training.parameters["conv"].grad.isfinite().all()
        hvd.join()
        assert_job_usable()


def check_ddp_hands_over_matrices() -> None:
    """A batch of two gives a gradient of rank 2 on each rank."""
    with apart_with_process_group(**_SETTING, PERSEUS_POWERSGD_WARMUP_STEPS=0):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        exact = copy.deepcopy(network)
        batches = torch.randn(hvd.size(), 2, 64, generator=torch.Generator().manual_seed(1))
        model = DistributedDataParallel(network)
        model(batches[hvd.rank()]).square().sum().backward()
        for batch in batches:
            (exact(batch).square().sum() / hvd.size()).backward()
        for ours, expected in zip(network.parameters(), exact.parameters(), strict=True):
            assert torch.allclose(ours.grad, expected.grad, rtol=1e-3, atol=1e-3)
            if ours.dim() == 2:
                assert np.linalg.matrix_rank(ours.grad.numpy(), tol=1e-2) == 2 * hvd.size()
        model.zero_grad()
        model(torch.randn(40, 64)).square().sum().backward()
        for parameter in network.parameters():
            if parameter.dim() == 2:
                assert np.linalg.matrix_rank(parameter.grad.numpy(), tol=1e-2) == 8


def check_what_makes_no_sense_is_refused() -> None:
    for rank in (0, -1, 1.5, 2000, "4"):
        text = raised(ValueError, lambda rank=rank: hvd.Compression.powersgd(rank))
        assert "expected a whole number from 1 to 1024" in text
    text = raised(ValueError, lambda: _Training(hvd.Compression.powersgd))
    assert "call it: compression=hvd.Compression.powersgd(4)" in text
    numbers = torch.arange(4096, dtype=torch.int32).reshape(64, 64)
    text = raised(
        ValueError,
        lambda: hvd.allreduce(numbers, name="n", compression=hvd.Compression.powersgd(2)),
    )
    assert "PowerSGD compress floating-point" in text
    assert_job_usable()
