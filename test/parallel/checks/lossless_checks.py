"""Checks of Compression.lossless, run on every rank: the exact bits, in fewer bytes."""

from __future__ import annotations

import torch
from gradient_settings import apart
from worlds import world_with

import perseus
import perseus.torch.horovod as hvd

SHAPES = [(300, 211), (5,), (64,), (20_000,)]
DTYPES = (torch.float32, torch.bfloat16)
COMPRESSION = hvd.Compression


def _gradients(dtype: torch.dtype, step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    drawn = [torch.randn(shape, generator=generator) * 1e-3 for shape in SHAPES]
    for index in range(0, drawn[0].numel(), 1001):  # what has no exponent like its neighbours'
        drawn[0].view(-1)[index] = (0.0, -0.0, 1e-42, -3e38, float("inf"))[index // 1001 % 5]
    return [tensor.to(dtype) for tensor in drawn]


def _reduced(compression: object, dtype: torch.dtype, **options: object) -> list[torch.Tensor]:
    return hvd.grouped_allreduce(
        _gradients(dtype), compression=compression, name="gradients", **options
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _assert_same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == right.dtype
        different = (_bits(result) != _bits(right)).sum().item()
        assert different == 0, (result.dtype, result.shape)
        # gathered as numbers that NaNs do not make unequal
        gathered = hvd.allgather(_bits(result).int().reshape(1, -1))
        assert all(torch.equal(row, gathered[0]) for row in gathered)


def check_the_bits_are_those_of_no_compression() -> None:
    with apart():
        for dtype in DTYPES:
            for options in (
                {"op": hvd.Average},
                {"op": hvd.Sum},
                {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7},
            ):
                expected = _reduced(COMPRESSION.none, dtype, **options)
                _assert_same(_reduced(COMPRESSION.lossless, dtype, **options), expected)


def check_the_bits_are_the_same_with_several_ranks_on_a_host() -> None:
    """Sums inside a host are rounded as exact ones are, and go their way in the same order."""
    with world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=2):
        for dtype in DTYPES:
            expected = _reduced(COMPRESSION.none, dtype, op=hvd.Average)
            _assert_same(_reduced(COMPRESSION.lossless, dtype, op=hvd.Average), expected)


def check_fewer_bytes_travel() -> None:
    def sent(compression: object, dtype: torch.dtype) -> int:
        drawn = torch.randn(1 << 20).to(dtype)
        before = perseus.stats()["tcp_bytes_sent"]
        hvd.allreduce(drawn, compression=compression, name="large")
        return perseus.stats()["tcp_bytes_sent"] - before

    with apart(PERSEUS_TRANSPORT="tcp"):
        for dtype, share in zip(DTYPES, (0.86, 0.72), strict=True):
            ratio = sent(COMPRESSION.lossless, dtype) / sent(COMPRESSION.none, dtype)
            assert share - 0.02 < ratio < share + 0.01, (dtype, ratio)


def check_nothing_is_encoded_inside_a_host() -> None:
    """With one host it is the exact exchange, whatever else the settings say."""
    with world_with(PERSEUS_ALLREDUCE_DTYPE=0, PERSEUS_ALLREDUCE_CODEC="lossless"):
        drawn = torch.randn(1 << 20)
        counts = []
        for compression in (COMPRESSION.none, COMPRESSION.lossless, COMPRESSION.settings):
            before = perseus.stats()["shm_bytes_sent"]
            hvd.allreduce(drawn, compression=compression, name="large")
            counts.append(perseus.stats()["shm_bytes_sent"] - before)
        assert max(counts) < 1.01 * min(counts), counts


def _trained(compression: object) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in (50_000, 700)]
    options = {} if compression is None else {"compression": compression}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        named_parameters=[("p", parameters[0]), ("q", parameters[1])],
        **options,
    )
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        for parameter in parameters:
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        optimizer.step()
    assert optimizer.state_dict().keys() == {"state", "param_groups"}, "nothing is held back"
    return [parameter.detach() for parameter in parameters]


def check_a_variable_asks_for_it() -> None:
    for size in (1, 2):
        with apart(LIGHT_INTRA_SIZE=size):
            expected = _trained(COMPRESSION.none)
            _assert_same(_trained(COMPRESSION.lossless), expected)
        for dtype in (0, 2):
            settings = {"PERSEUS_ALLREDUCE_CODEC": "lossless", "PERSEUS_ALLREDUCE_DTYPE": dtype}
            with apart(LIGHT_INTRA_SIZE=size, **settings):
                _assert_same(_trained(None), expected)


def check_other_types_travel_as_they_are() -> None:
    with apart():
        for dtype in (torch.float16, torch.float64, torch.int32):
            given = (torch.arange(5_000) % 97 - 40 + hvd.rank()).to(dtype)
            if dtype.is_floating_point:
                given /= 3
            expected = hvd.allreduce(given, op=hvd.Sum)
            result = hvd.allreduce(given, op=hvd.Sum, compression=COMPRESSION.lossless)
            assert result.dtype == dtype and torch.equal(result, expected)
