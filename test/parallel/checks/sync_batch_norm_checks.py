"""SyncBatchNorm on each rank's part of a batch, against torch.nn.BatchNorm on the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from patterns import assert_job_usable, assert_same, raised
from torch import nn

import perseus.torch.horovod as hvd

CHANNELS = 3
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TAILS = {2: (), 3: (4,), 4: (2, 5), 5: (2, 1, 3)}
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-3, "atol": 1e-3},
    torch.float16: {"rtol": 2e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 1e-1, "atol": 1e-1},
}


def _rows(kind: str) -> list[int]:
    """How many samples each rank has."""
    n = hvd.size()
    return {
        "even": [4] * n,
        "uneven": [r + 2 for r in range(n)],
        "single": [5, *[1] * (n - 1)],
        "none": [3, 0, *[2] * (n - 2)],
    }[kind]


def _whole(rows: int, ndim: int, salt: int = 0) -> torch.Tensor:
    """A batch whose channels differ in mean and spread."""
    generator = torch.Generator().manual_seed(17 + salt)
    shape = (1, CHANNELS, *[1] * (ndim - 2))
    noise = torch.randn(rows, CHANNELS, *TAILS[ndim], generator=generator, dtype=torch.float64)
    spread = torch.tensor([1.0, 5.0, 0.25], dtype=torch.float64).view(shape)
    return noise * spread + torch.tensor([0.0, -7.0, 3.0], dtype=torch.float64).view(shape)


def _layers(ndim: int, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A SyncBatchNorm and the plain layer in float64, with equal parameters other than 1 and 0."""
    layers = hvd.SyncBatchNorm(CHANNELS, **options), PLAIN[ndim](CHANNELS, **options)
    for layer in layers:
        if layer.affine:
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([1.5, -0.5, 2.0]))
                layer.bias.copy_(torch.tensor([0.25, 1.0, -3.0]))
    return layers[0].to(dtype), layers[1].double()


def _mine(whole: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return whole.split(rows)[hvd.rank()]


def _compare(
    kind: str,
    ndim: int,
    dtype: torch.dtype,
    layers: tuple[nn.Module, nn.Module],
    *,
    input_dtype: torch.dtype | None = None,
    salt: int = 0,
) -> None:
    """One forward and backward; parameters' gradients are compared as sums over the ranks."""
    rows = _rows(kind)
    synced, plain = layers
    input_dtype = dtype if input_dtype is None else input_dtype
    whole = _whole(sum(rows), ndim, salt).to(input_dtype).double().requires_grad_()
    mine = _mine(whole.detach(), rows).to(input_dtype).requires_grad_()
    weights = _whole(sum(rows), ndim, salt + 1).to(input_dtype).double()
    expected = plain(whole)
    (expected * weights).sum().backward()
    actual = synced(mine)
    assert actual.dtype == input_dtype
    (actual * _mine(weights, rows).to(input_dtype)).sum().backward()
    tolerance = TOLERANCE[input_dtype]
    torch.testing.assert_close(actual.double(), _mine(expected.detach(), rows), **tolerance)
    torch.testing.assert_close(mine.grad.double(), _mine(whole.grad, rows), **tolerance)
    for name, parameter in plain.named_parameters():
        own = synced.get_parameter(name)
        total = hvd.allreduce(own.grad.double(), op=hvd.Sum, name=f"grad.{name}")
        torch.testing.assert_close(total, parameter.grad, **tolerance)
        own.grad = parameter.grad = None
    for name, right in plain.named_buffers():
        buffer = synced.get_buffer(name)
        torch.testing.assert_close(buffer.double(), right.double(), **tolerance)
        everywhere = hvd.allgather(buffer.unsqueeze(0), name=f"buffer.{name}")
        assert all(torch.equal(row, buffer) for row in everywhere), name


def check_equals_plain_batch_norm_on_the_joined_batch() -> None:
    for dtype in (torch.float64, torch.float32):
        for ndim in PLAIN:
            for kind in ("even", "uneven", "single", "none"):
                layers = _layers(ndim, dtype)
                for step in range(2):
                    _compare(kind, ndim, dtype, layers, salt=step)


def check_cumulative_average_of_running_statistics() -> None:
    layers = _layers(4, torch.float64, momentum=None)
    for step in range(4):
        _compare("uneven", 4, torch.float64, layers, salt=10 * step)
    assert layers[0].num_batches_tracked.item() == 4


def check_other_momentum_and_eps() -> None:
    _compare("uneven", 3, torch.float64, _layers(3, torch.float64, momentum=0.75, eps=0.5))


def check_without_parameters_or_running_statistics() -> None:
    for options in (
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ):
        _compare("uneven", 4, torch.float64, _layers(4, torch.float64, **options))


def check_half_precision_inputs_with_float_parameters() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        layers = _layers(4, torch.float32)
        _compare("uneven", 4, torch.float32, layers, input_dtype=dtype)
        assert layers[0].running_mean.dtype == torch.float32
        _compare("even", 4, dtype, _layers(4, dtype))


def check_channels_last_stays_channels_last() -> None:
    synced, plain = _layers(4, torch.float64)
    rows = _rows("uneven")
    whole = _whole(sum(rows), 4)
    mine = _mine(whole, rows).contiguous(memory_format=torch.channels_last).requires_grad_()
    actual = synced(mine)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual, _mine(plain(whole), rows))
    (actual**2).sum().backward()
    assert mine.grad.is_contiguous(memory_format=torch.channels_last)


def check_inputs_and_gradients_with_gaps() -> None:
    n, rank = hvd.size(), hvd.rank()
    for ndim in (2, 4):
        gaps = _whole(4 * n, ndim, salt=1)[1::2]
        for gradient in (gaps, gaps.flatten(1)[:, :1].view(2 * n, *[1] * (ndim - 1))):
            synced, plain = _layers(ndim, torch.float64)
            whole = _whole(4 * n, ndim).requires_grad_()
            mine = whole.detach().clone().requires_grad_()
            actual, expected = synced(mine[::2].split(2)[rank]), plain(whole[::2])
            torch.testing.assert_close(actual, expected.split(2)[rank])
            expected.backward(gradient.expand_as(expected))
            actual.backward(gradient.split(2)[rank].expand_as(actual))
            rows = slice(4 * rank, 4 * rank + 4)
            torch.testing.assert_close(mine.grad[rows], whole.grad[rows])


def check_other_sizes_after_the_channels_on_each_rank() -> None:
    widths = [3 + r for r in range(hvd.size())]
    synced, plain = _layers(3, torch.float64)
    whole = _whole(sum(widths), 2).requires_grad_()  # each row a position
    mine = whole.detach().split(widths)[hvd.rank()].t().unsqueeze(0).contiguous().requires_grad_()
    actual = synced(mine)
    expected = plain(whole)
    torch.testing.assert_close(actual[0].t(), expected.split(widths)[hvd.rank()])
    (actual**3).sum().backward()
    (expected**3).sum().backward()
    torch.testing.assert_close(mine.grad[0].t(), whole.grad.split(widths)[hvd.rank()])


def check_only_the_parameters_need_gradients() -> None:
    synced, plain = _layers(3, torch.float64)
    rows = _rows("uneven")
    whole = _whole(sum(rows), 3)
    (synced(_mine(whole, rows)) ** 2).sum().backward()
    (plain(whole) ** 2).sum().backward()
    total = hvd.allreduce(synced.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(total, plain.weight.grad)


def check_eval_mode_does_not_communicate() -> None:
    synced, plain = _layers(4, torch.float64)
    _compare("even", 4, torch.float64, (synced, plain))
    synced.eval()
    plain.eval()
    before = synced.running_mean.clone()
    if hvd.rank() == 0:  # the others would be waited for
        batch = _whole(2, 4, salt=5)
        torch.testing.assert_close(synced(batch), plain(batch))
        batch_statistics = _layers(4, torch.float64, track_running_stats=False)
        for layer in batch_statistics:
            layer.eval()
        torch.testing.assert_close(batch_statistics[0](batch), batch_statistics[1](batch))
    assert_same(synced.running_mean, before)
    assert_job_usable()


def check_large_means_keep_their_precision() -> None:
    rows = _rows("uneven")
    whole = _whole(sum(rows), 3) + 1e4
    synced, plain = _layers(3, torch.float32)
    actual = synced(_mine(whole, rows).float())
    expected = plain(whole.float().double())
    torch.testing.assert_close(actual.double(), _mine(expected, rows), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(synced.running_var.double(), plain.running_var, rtol=1e-4, atol=1e-6)


def check_one_value_per_channel_is_refused_on_every_rank() -> None:
    synced, _ = _layers(2, torch.float32)
    mine = torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS)
    text = raised(ValueError, lambda: synced(mine))
    assert "Expected more than 1 value per channel when training" in text
    assert synced.running_mean.tolist() == [0.0] * CHANNELS
    assert_job_usable()


def check_a_batch_without_samples_on_any_rank_changes_no_statistics() -> None:
    for ndim, tail in TAILS.items():
        synced, plain = _layers(ndim, torch.float64)
        _compare("uneven", ndim, torch.float64, (synced, plain))
        before = synced.running_mean.clone(), synced.running_var.clone()
        synced.zero_grad()
        mine = torch.empty(0, CHANNELS, *tail, dtype=torch.float64, requires_grad=True)
        actual = synced(mine)
        assert actual.shape == mine.shape
        actual.sum().backward()
        assert mine.grad is not None and mine.grad.shape == mine.shape
        assert synced.weight.grad.tolist() == synced.bias.grad.tolist() == [0.0] * CHANNELS
        assert_same(synced.running_mean, before[0])
        assert_same(synced.running_var, before[1])
        assert synced.num_batches_tracked.item() == 2
        with torch.no_grad():
            plain.num_batches_tracked.add_(1)
        _compare("uneven", ndim, torch.float64, (synced, plain))


def check_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    synced, _ = _layers(2, torch.float32)
    assert "expected at least 2D input (got 1D input)" in raised(
        ValueError, lambda: synced(torch.ones(3))
    )
    assert "expected 3" in raised(ValueError, lambda: synced(torch.ones(2, CHANNELS + 1)))
    assert_job_usable()


def check_training_a_model_equals_one_rank_on_the_joined_batch() -> None:
    def model(norm: Any) -> nn.Module:
        torch.manual_seed(4)
        layers = [nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 2)).double()

    synced, plain = model(hvd.SyncBatchNorm), model(nn.BatchNorm2d)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(synced.parameters(), lr=0.1), synced.named_parameters()
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.rand(2 * hvd.size(), 1, 8, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (synced(images.split(2)[hvd.rank()]) ** 2).mean().backward()
        optimizer.step()
        reference.zero_grad()
        (plain(images) ** 2).mean().backward()
        reference.step()
    for (name, own), right in zip(
        synced.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, right, msg=lambda m, n=name: f"{n}: {m}")
