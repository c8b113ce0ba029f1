"""perseus.torch.ddp.hooks in one process, what it refuses, and what becomes of a killed rank."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perseus.torch.ddp import hooks, register_comm_hook
from perseus.torch.ddp.blocks import BLOCK, Format
from perseus.torch.ddp.gradients import Gradients, Parameter
from perseus.torch.ddp.sparse import TopK, largest
from perseus.torch.ddp.worker import Worker

pytestmark = pytest.mark.shared
DTYPES = [torch.int8, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "rotate", "auto"])
def test_one_rank_alone_keeps_its_gradients(name):
    model = DistributedDataParallel(torch.nn.Linear(40, 30))
    register_comm_hook(model, name)
    for step in range(1, 5):
        model.zero_grad()
        model(torch.full((1, 40), 0.1 * step)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((30, 40), 0.1 * step))


def test_an_unknown_hook_is_refused_with_the_choices():
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match="'int4': choose one of fp16, bf16, int8, topk, rotate"):
        register_comm_hook(model, "int4")


def test_a_model_without_ddp_is_refused():
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got a Linear"):
        register_comm_hook(torch.nn.Linear(4, 3), "int8")


def test_a_second_hook_is_refused():
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    register_comm_hook(model, "int8")
    with pytest.raises(RuntimeError, match="can only be called once"):
        register_comm_hook(model, "fp16")


def test_topk_refuses_a_bucket_with_more_positions_than_32_bits_hold():
    count = 2**31
    parameters = [Parameter("w", (2**16, 2**15), 0, count)]
    gradients = Gradients(torch.empty(count, device="meta"), parameters, last=True)
    topk = TopK(0.01, 0)
    with pytest.raises(ValueError, match=r"2147483648 elements: .*2147483647.*bucket_cap_mb"):
        topk.average(gradients, dist.group.WORLD, 0)
    assert topk.held() == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hooks.TopKState(ratio=0), "ratio=0: expected a fraction"),
        (lambda: hooks.TopKState(ratio=1.5), r"ratio=1\.5: expected a fraction"),
        (lambda: hooks.TopKState(warm_up=-1), "warm_up=-1: expected a number of steps"),
        (lambda: hooks.RotateState(n=0), "n=0: expected a whole number from 1"),
        (lambda: hooks.RotateState(n=0.5), r"n=0\.5: expected a whole number from 1"),
        (lambda: hooks.AutoState(candidates=["rotate"]), "expected some of exact, fp16"),
        (lambda: hooks.AutoState(candidates=[]), "expected some of exact, fp16"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_magnitude_survive_a_block(dtype):
    form = Format(dtype)
    magnitudes = torch.logspace(-34, 37, 75)
    values = torch.randn(75, 2 * BLOCK, generator=torch.Generator().manual_seed(5)).clamp_(-3, 3)
    values *= magnitudes[:, None]
    message = torch.empty(75, form.bytes(2 * BLOCK), dtype=torch.uint8)
    decoded, original = torch.empty_like(values), values.clone()
    form.encode(values, message)
    form.decode(message, decoded)
    largest_of = original.view(75, 2, BLOCK).abs().amax(2, keepdim=True)
    step = {torch.int8: 1 / 127, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    error = (decoded - original).view(75, 2, BLOCK).abs()
    assert (error <= largest_of * step * 0.505 if dtype == torch.int8 else largest_of * step).all()
    if form.keeps_errors:
        # Multiples of the scale are floats, and so is what rounding leaves.
        assert torch.equal(values.double(), original.double() - decoded.double())
    form.decode(message, decoded, add=True)
    torch.testing.assert_close(decoded, 2 * original, rtol=0, atol=2 * error.max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_nan_and_others_are_not(dtype, bad):
    form = Format(dtype)
    values = torch.ones(1, 3 * BLOCK)
    values[0, BLOCK + 7] = bad
    message = torch.empty(1, form.bytes(3 * BLOCK), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    form.encode(values, message)
    form.decode(message, decoded)
    nan = decoded.isnan().view(3, BLOCK)
    assert nan[1].all() and not nan[0].any() and not nan[2].any()
    if form.keeps_errors:
        assert values.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_numbers_that_vanish_are_finite(dtype):
    form = Format(dtype)
    values = torch.full((1, BLOCK), 1e-42)
    values[0, ::2] = 0
    message = torch.empty(1, form.bytes(BLOCK), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    form.encode(values, message)
    form.decode(message, decoded)
    assert decoded.abs().max() <= 1e-41


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_the_largest_elements_are_found(count):
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(count))
    found = largest(values, count)
    assert 0.75 * count <= len(found) <= count and len(set(found.tolist())) == len(found)
    ranked = values.abs().sort(descending=True).values
    assert values[found].abs().min() >= ranked[count - 1]
    # A sample that misleads: all large values stand where it does not look.
    values = torch.zeros(300_000)
    values[1 : 2 * count : 2] = torch.arange(1.0, count + 1)
    assert sorted(largest(values, count).tolist()) == list(range(1, 2 * count, 2))


DYING = """
import datetime, os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from perseus.torch.ddp import register_comm_hook

rank, place = int(sys.argv[1]), sys.argv[2]
limit = datetime.timedelta(seconds=300)
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=limit)

class Dies(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if rank == 1 and steps == 2:
            os._exit(0)
        return gradient

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        first, *others = self.layers
        x = Dies.apply(first(x))
        for layer in others:
            x = layer(x)
        return x

model = DistributedDataParallel(Layers(), bucket_cap_mb=0.02)
register_comm_hook(model, sys.argv[3])
try:
    for steps in range(3):
        model(torch.ones(2, 64)).sum().backward()
except RuntimeError as error:
    print("ended:", steps, error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("name", ["int8", pytest.param("topk", marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_step_of_the_others(tmp_path, name):
    command = [sys.executable, "-c", DYING]
    arguments = [f"file://{tmp_path}/store", name]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 0 and "ended: 2" in output
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_thread_that_cannot_be_started_is_started_for_the_next_exchange(monkeypatch):
    worker = Worker()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            worker.submit(lambda: torch.ones(3))
    done = threading.Event()
    future = worker.submit(lambda: torch.arange(3.0))
    future.add_done_callback(lambda _: done.set())
    assert done.wait(30) and torch.equal(future.wait(), torch.arange(3.0))
