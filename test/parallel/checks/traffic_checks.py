"""Two hosts of two ranks each: how much goes between them by mode, threshold, dtype and codec, and
that all ranks end with the same bits.

docs/algorithms.md has the arithmetic, for H = 2 hosts of K = 2 ranks. Needs real hosts: see
test/hosts/test_traffic.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from worlds import world_with

import perseus
import perseus.torch.horovod as hvd
from perseus import control

ELEMENTS = 1 << 18
BYTES = 4 * ELEMENTS

Settings = dict[str, object]
# How many times a gradient's encoded bytes a host's first and second rank send to the other host.
STAGED, ALIKE, ONE_SPEAKS = (1 / 2, 1 / 2), (1.0, 1.0), (1.0, 0.0)
FORMS: list[tuple[tuple[float, float], Settings]] = [
    (STAGED, {}),
    (STAGED, {"LIGHT_2D_ALLREDUCE": 1}),
    (ALIKE, {"LIGHT_2D_ALLREDUCE": 0}),
    (ALIKE, {"PERSEUS_ALLREDUCE_MODE": 0}),
    (ONE_SPEAKS, {"PERSEUS_ALLREDUCE_MODE": 1}),
    (STAGED, {"LIGHT_HIERARCHICAL_THRESHOLD": BYTES}),
    (ALIKE, {"LIGHT_HIERARCHICAL_THRESHOLD": BYTES - 1}),
    (ALIKE, {"LIGHT_HIERARCHICAL_THRESHOLD": BYTES - 1, "PERSEUS_ALLREDUCE_MODE": 1}),
]
# Encoded bytes for one of float32, and the largest error of a mean; None = elements are missing.
EXACT, HALF, BRAIN, INT8 = (1.0, 1e-6), (1 / 2, 0.01), (1 / 2, 0.08), (65 / 256, 0.1)
INT4, INT2 = (33 / 256, 0.6), (20 / 256, 3.0)
# Of top-k the contributions; a result has what all contributions have.
TOP_K = (0.0175, None)
STEADY = {"LIGHT_TOPK_WARMUP_STEPS": 0}


def _gradient(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ELEMENTS, generator=generator)


def _reduced(compression: object, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """This rank's gradient after a step, and how many times its bytes went to the other host."""
    parameter = nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    options = {} if compression is None else {"compression": compression}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.125), named_parameters=[("p", parameter)], **options
    )
    control.gather_lines("", "ready")
    before = perseus.stats()["tcp_bytes_sent"]
    (parameter * _gradient(hvd.rank()).to(dtype)).sum().backward()
    optimizer.synchronize()
    sent = perseus.stats()["tcp_bytes_sent"] - before
    return parameter.grad, sent / (ELEMENTS * parameter.element_size())


def _expect(
    times: tuple[float, float],
    codec: tuple[float, float | None],
    where: object,
    compression: object = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    share, most = codec
    gradient, sent = _reduced(compression, dtype)
    if codec is TOP_K:
        members = 4 if times is ALIKE else 2
        share *= (1 + members) / 2
    expected = times[hvd.local_rank()] * share
    # Headers, negotiation, and top-k's choice among equals: of the whole, not of what is expected.
    assert abs(sent - expected) < 0.02 * expected + 0.006, (where, sent, expected)
    digest = hashlib.sha256(gradient.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert len(set(control.gather_lines(digest, "digest"))) == 1, where
    if most is not None:
        mean = torch.stack([_gradient(rank).double() for rank in range(hvd.size())]).mean(dim=0)
        error = float((gradient.double() - mean).abs().max())
        assert error < most, (where, error)


def check_two_hosts_of_two() -> None:
    """Nobody plays anything: what goes to the other host goes over its network."""
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)


def check_precision_by_mode_and_threshold() -> None:
    """PERSEUS_ALLREDUCE_DTYPE with every form; 0 sends between hosts what auto sends."""
    for times, form in FORMS:
        for dtype, codec in (("auto", HALF), (0, HALF), (1, EXACT)):
            with world_with(PERSEUS_ALLREDUCE_DTYPE=dtype, **form):
                _expect(times, codec, (form, dtype))


def check_a_broadcast_goes_to_the_other_host_once() -> None:
    """From any root, both ranks of its host send half of it; the other host sends nothing back."""
    for root in (0, 3):
        tensor = _gradient(hvd.rank())
        control.gather_lines("", "ready")
        before = perseus.stats()["tcp_bytes_sent"]
        hvd.broadcast_(tensor, root)
        sent = (perseus.stats()["tcp_bytes_sent"] - before) / BYTES
        expected = 1 / 2 if hvd.rank() // 2 == root // 2 else 0.0
        assert abs(sent - expected) < 0.006, (root, sent, expected)
        assert torch.equal(tensor, _gradient(root)), root


def _wishes() -> Iterator[tuple[object, tuple[float, float | None]]]:
    yield hvd.Compression.none, EXACT
    yield hvd.Compression.fp16, HALF
    yield hvd.Compression.bf16, BRAIN
    yield hvd.Compression.int8, INT8
    yield hvd.Compression.int4, INT4
    yield hvd.Compression.int2, INT2
    yield hvd.Compression.topk(0.01), TOP_K


def check_compression_by_mode_and_threshold() -> None:
    """`compression=` with every form."""
    for times, form in FORMS:
        with world_with(**form, **STEADY):
            for compression, codec in _wishes():
                _expect(times, codec, (form, compression), compression)


def check_codecs_by_threshold() -> None:
    """The settings that send less, below and above the threshold, with either precision inside."""
    for times, form in (FORMS[0], FORMS[6]):
        for dtype in (2, 0):
            for codec, settings in (
                (INT8, {"PERSEUS_ALLREDUCE_CODEC": "int8"}),
                (TOP_K, {"LIGHT_TOPK_ALLREDUCE": 1}),
                (INT4, {"PERSEUS_ALLREDUCE_CODEC": "int4"}),
                (INT2, {"PERSEUS_ALLREDUCE_CODEC": "auto", "PERSEUS_LINK_GBIT": 0.001}),
            ):
                with world_with(PERSEUS_ALLREDUCE_DTYPE=dtype, **form, **settings, **STEADY):
                    _expect(times, codec, (form, dtype, settings))


def check_gradients_stay_inside_hosts_where_parameters_are_averaged() -> None:
    """Compression.rotate and PERSEUS_DOWNSAMPLE_N_ELEMENTS: each host has its own mean, even where
    all ranks are treated alike."""
    host = [rank for rank in range(4) if rank // 2 == hvd.rank() // 2]
    mean = torch.stack([_gradient(rank).double() for rank in host]).mean(dim=0)
    for _, form in FORMS[:5]:
        for compression, settings in (
            (hvd.Compression.rotate(4), {}),
            (None, {"PERSEUS_DOWNSAMPLE_N_ELEMENTS": 4}),
        ):
            with world_with(**settings, **form):
                gradient, sent = _reduced(compression, torch.float32)
            assert (gradient.double() - mean).abs().max() < 1e-6, form
            assert sent < 0.006, (form, sent)


def check_other_dtypes_by_mode() -> None:
    """float16, bfloat16 and float64 gradients go as they are; asked for, float64 is encoded."""
    for times, form in (FORMS[0], FORMS[3]):
        for precision in (2, 0):
            with world_with(PERSEUS_ALLREDUCE_DTYPE=precision, **form):
                for dtype, most in (
                    (torch.float16, 0.01),
                    (torch.bfloat16, 0.08),
                    (torch.float64, 1e-6),
                ):
                    _expect(times, (1.0, most), (form, precision, dtype), dtype=dtype)
                _expect(times, (1 / 4, 0.01), form, hvd.Compression.fp16, torch.float64)
