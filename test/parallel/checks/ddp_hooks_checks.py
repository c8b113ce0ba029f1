"""perseus.torch.ddp.hooks on gloo, and on the backend "perseus"."""

from __future__ import annotations

import datetime
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_checks import assert_trained_alike, batches, details, network, train
from ddp_gradient_checks import Complex, ComplexBucket, complex_batch
from patterns import assert_same, let_gloo_finish, raised, shared_folder
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.distributed
import perseus.torch.horovod as hvd
from perseus.torch.ddp import hooks, owners, register_comm_hook, sparse

NAMES = ["fp16", "bf16", "int8", "topk", "rotate", "auto"]
HOLDING = [("int8", {}), ("topk", {"ratio": 0.1, "warm_up": 2}), ("rotate", {"n": 3})]
BACKENDS = ["gloo", "perseus"]
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}


@contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """The default group, of all ranks."""
    perseus.torch.distributed.register()
    dist.init_process_group(
        backend,
        init_method=f"file://{shared_folder()}/store",
        rank=hvd.rank(),
        world_size=hvd.size(),
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield
    finally:
        let_gloo_finish()
        dist.destroy_process_group()


class Given(torch.nn.Module):
    """Parameters whose gradients are what forward() gets: a matrix, a small one, and a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [(70, 61), (5, 7), (300,)]
        self.parts = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        )

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum((part * each).sum() for part, each in zip(self.parts, given, strict=True))

    def gradients(self, rank: int, step: int = 0) -> list[torch.Tensor]:
        """Different on each rank, in each step and at each place, of very different sizes."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        return [
            (torch.randn(part.shape, generator=generator) * 10.0 ** (2 * number - 2)).to(part.dtype)
            for number, part in enumerate(self.parts)
        ]


def step_of(model: DistributedDataParallel, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """One backward pass; what it leaves in .grad."""
    model.zero_grad()
    model(given).backward()
    return [part.grad.clone() for part in model.module.parts]


def exact(model: DistributedDataParallel, step: int) -> list[torch.Tensor]:
    """The mean of all ranks' gradients, in float64."""
    everywhere = [model.module.gradients(rank, step) for rank in range(hvd.size())]
    return [
        torch.stack([e.double() for e in each]).mean(0) for each in zip(*everywhere, strict=True)
    ]


def assert_same_everywhere(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        everywhere = [torch.empty_like(tensor) for _ in range(hvd.size())]
        dist.all_gather(everywhere, tensor.contiguous())
        for other in everywhere:
            assert_same(other.nan_to_num(12345.0), tensor.nan_to_num(12345.0))


def check_hooks_train_in_every_form_of_ddp() -> None:
    forms: list[dict[str, Any]] = [
        {},
        SMALL_BUCKETS,
        {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
        {**SMALL_BUCKETS, "static_graph": True},
        {**SMALL_BUCKETS, "find_unused_parameters": True},
    ]
    # As far as 4 steps come to those of exact gradients; topk and rotate hold most of them back.
    tolerances = {"fp16": 1e-5, "bf16": 1e-4, "int8": 1e-4, "auto": 1e-4, "topk": 1, "rotate": 1}
    for backend in BACKENDS:
        with process_group(backend):
            for name in NAMES:
                for form in forms if backend == "gloo" else forms[1:2]:
                    model = DistributedDataParallel(network(), **form)
                    register_comm_hook(model, name)
                    train(model)
                    assert_trained_alike(details(model), tolerances[name])


def check_buckets_do_not_change_the_bits() -> None:
    with process_group():
        for name, options in [("fp16", {}), *HOLDING[:2]]:
            trained = []
            for form in ({}, SMALL_BUCKETS):
                model = DistributedDataParallel(network(), **form)
                register_comm_hook(model, name, **options)
                train(model)
                trained.append(details(model))
            for one, other in zip(*trained, strict=True):
                assert_same(one, other)


def check_results_are_within_the_bounds_of_rounding() -> None:
    """Half a step of the largest value's grid, for the senders and again for the owner."""
    with process_group():
        for name, grid in (("fp16", 2.0**-11), ("bf16", 2.0**-8), ("int8", 1 / 127)):
            model = DistributedDataParallel(Given())
            register_comm_hook(model, name)
            applied = step_of(model, model.module.gradients(hvd.rank()))
            assert_same_everywhere(applied)
            everywhere = [model.module.gradients(rank) for rank in range(hvd.size())]
            for number, (got, mean) in enumerate(zip(applied, exact(model, 0), strict=True)):
                largest = max(each[number].abs().max().item() for each in everywhere)
                error = (got - mean).abs().max().item()
                assert error <= largest * grid * 1.01, (name, number, error, largest)
                assert error > 0


def check_what_is_applied_and_what_is_held_back_is_all_there_was() -> None:
    with process_group():
        for name, options in HOLDING:
            model = DistributedDataParallel(Given(), **SMALL_BUCKETS)
            state = register_comm_hook(model, name, **options)
            applied = [torch.zeros(part.shape).double() for part in model.module.parts]
            total = [torch.zeros_like(each) for each in applied]
            for step in range(7):
                got = step_of(model, model.module.gradients(hvd.rank(), step))
                for number, mean in enumerate(exact(model, step)):
                    applied[number] += got[number]
                    total[number] += mean
            everywhere: list[Any] = [None] * hvd.size()
            dist.all_gather_object(everywhere, state.state_dict()["held"])
            for number, (got, wanted) in enumerate(zip(applied, total, strict=True)):
                held = [each[f"parts.{number}"] for each in everywhere]
                back = torch.stack([each["sent"].double() for each in held]).sum(0)
                if "owned" in held[0]:
                    back += torch.cat([each["owned"] for each in held])
                scale = wanted.abs().max().item()
                assert back.abs().max() < 10 * scale
                torch.testing.assert_close(
                    got + back.view_as(got), wanted, rtol=0, atol=1e-5 * scale
                )


def check_fewer_bytes_are_sent() -> None:
    sent: Counter[str] = Counter()

    def counting(collective: Any, which: int, peers: int) -> Any:
        def call(*tensors: Any, **kwargs: Any) -> Any:
            sent[collective.__name__] += tensors[which].nbytes * peers
            return collective(*tensors, **kwargs)

        return call

    size = 1 << 20
    shares = [
        ("fp16", {}, 0.51),
        ("int8", {}, 0.26),
        ("topk", {"ratio": 0.01, "warm_up": 0}, 0.01 * hvd.size() + 0.001),
        ("rotate", {"n": 8}, 0.126),
    ]
    with process_group(), pytest.MonkeyPatch.context() as patch:
        # What is counted is N / (N - 1) times what a rank sends, of each.
        gather = counting(owners.all_gather, 1, hvd.size())
        patch.setattr(owners, "all_gather", gather)
        patch.setattr(sparse, "all_gather", gather)
        patch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single, 1, 1))
        patch.setattr(dist, "all_reduce", counting(dist.all_reduce, 0, 2))
        for name, options, share in shares:
            model = DistributedDataParallel(torch.nn.Linear(1024, size // 1024, bias=False))
            register_comm_hook(model, name, **options)
            model(torch.randn(2, 1024)).sum().backward()
            total = sum(sent.values()) / (2 * 4 * size)  # an exact all-reduce counts as 1
            assert 0.8 * share < total <= share, (name, dict(sent), total)
            sent.clear()


def check_a_loaded_state_goes_on_with_the_same_bits() -> None:
    with process_group():
        for name, options in [("fp16", {}), *HOLDING, ("auto", {"candidates": ["int8"]})]:
            model = DistributedDataParallel(network(), **SMALL_BUCKETS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            state = register_comm_hook(model, name, **options)
            train(model, optimizer)
            file = io.BytesIO()
            torch.save([each.state_dict() for each in (model.module, optimizer, state)], file)
            train(model, optimizer)
            file.seek(0)
            saved = torch.load(file)
            other = network()
            other.load_state_dict(saved[0])
            other = DistributedDataParallel(other, **SMALL_BUCKETS)
            second = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
            second.load_state_dict(saved[1])
            loaded = register_comm_hook(other, name, **options)
            loaded.load_state_dict(saved[2])
            assert loaded.choice == state.choice == ("int8" if name == "auto" else None)
            train(other, second)
            for ours, expected in zip(details(other), details(model), strict=True):
                assert_same(ours, expected)
            assert saved[2]["held"].keys() == ({} if name == "fp16" else saved[0]).keys()


def check_states_that_do_not_fit_are_refused() -> None:
    with process_group():
        model = DistributedDataParallel(network())
        state = register_comm_hook(model, "topk")
        train(model)
        saved = state.state_dict()
        message = raised(ValueError, lambda: state.load_state_dict({**saved, "rank": 7}))
        assert f"saved by rank 7 of {hvd.size()}" in message
        assert f"on rank {hvd.rank()} of {hvd.size()}" in message
        with pytest.raises(ValueError, match="the hook topk"):
            state.load_state_dict({**saved, "hook": "int8"})
        with pytest.raises(ValueError, match=r"'ratio': 0\.5"):
            state.load_state_dict({**saved, "options": {"ratio": 0.5, "warm_up": 100}})
        other = register_comm_hook(DistributedDataParallel(Given()), "topk")
        with pytest.raises(ValueError, match=r"parameter parts\.0 has shape \(70, 61\)"):
            other.load_state_dict(saved)
        with pytest.raises(TypeError, match="state_dict"):
            torch.save(state, io.BytesIO())
        # Without names, parameters are known only in backward.
        named = DistributedDataParallel(Given())
        unnamed = hooks.TopKState()
        unnamed.load_state_dict(saved)
        named.register_comm_hook(unnamed, hooks.topk_hook)
        with pytest.raises(ValueError, match="saved for another model: parameter 0"):
            step_of(named, named.module.gradients(hvd.rank()))


def check_states_without_names() -> None:
    def hooked() -> tuple[DistributedDataParallel, hooks.Int8State]:
        model = DistributedDataParallel(Given())
        state = hooks.Int8State(model.process_group)
        model.register_comm_hook(state, hooks.int8_hook)
        return model, state

    with process_group():
        model, state = hooked()
        first, second = (model.module.gradients(hvd.rank(), step) for step in range(2))
        step_of(model, first)
        other, loaded = hooked()
        loaded.load_state_dict(state.state_dict())
        for ours, expected in zip(step_of(other, second), step_of(model, second), strict=True):
            assert_same(ours, expected)


def check_gradients_that_are_not_finite_are_so_on_all_ranks() -> None:
    with process_group():
        for name, options in [("fp16", {}), ("bf16", {}), *HOLDING]:
            for bad in (float("nan"), float("inf"), float("-inf")):
                model = DistributedDataParallel(Given())
                register_comm_hook(model, name, **options)
                given = model.module.gradients(hvd.rank())
                if hvd.rank() == hvd.size() - 1:
                    given[0][66, 60] = bad
                applied = step_of(model, given)
                assert applied[0].isnan().any(), (name, bad)
                assert_same_everywhere(applied)
                # The next step has forgotten it.
                for step in range(1, 4):
                    applied = step_of(model, model.module.gradients(hvd.rank(), step))
                    assert all(each.isfinite().all() for each in applied), (name, bad)


def check_models_of_every_float_type() -> None:
    with process_group():
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            for name in NAMES:
                model = DistributedDataParallel(Given(dtype))
                register_comm_hook(model, name)
                applied = step_of(model, model.module.gradients(hvd.rank()))
                assert all(each.dtype == dtype for each in applied)
                assert_same_everywhere(applied)
                if name not in ("topk", "rotate"):
                    for got, mean in zip(applied, exact(model, 0), strict=True):
                        error = (got.double() - mean).abs().max() / mean.abs().max()
                        assert error < 0.03, (dtype, name, error)


def check_both_parts_of_complex_gradients_are_averaged() -> None:
    expected = Complex()
    for rank in range(hvd.size()):
        (expected(complex_batch(rank)) / hvd.size()).backward()
    wanted = [parameter.grad for parameter in expected.parameters()]
    with process_group():
        for name in NAMES:
            model = DistributedDataParallel(Complex())
            state = register_comm_hook(model, name)
            model(complex_batch(hvd.rank())).backward()
            for parameter, mean in zip(model.parameters(), wanted, strict=True):
                error = (parameter.grad - mean).abs().max() / mean.abs().max()
                assert error < 0.03, (name, error)
            # A buffer of complex numbers, as other versions of torch hand it over.
            parameters = [model.module.w, model.module.b]
            for parameter in parameters:
                parameter.grad = parameter.detach() * (1j + hvd.rank())
            bucket = ComplexBucket(parameters)
            reduced = state.exchange(bucket).wait()
            assert reduced.data_ptr() == bucket.buffer().data_ptr()
            mean = torch.cat(
                [p.detach().view(-1) * (1j + (hvd.size() - 1) / 2) for p in parameters]
            )
            assert ((reduced - mean).abs().max() / mean.abs().max()) < 0.03, name


def check_sparse_gradients_are_refused() -> None:
    for backend in BACKENDS:
        with process_group(backend):
            model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
            register_comm_hook(model, "int8")
            loss = model(torch.tensor([hvd.rank(), 9])).sum()
            message = raised(ValueError, loss.backward)
            assert "gradients are sparse" in message


def check_groups_of_some_ranks() -> None:
    with process_group():
        first = list(range(hvd.size() - 1))
        groups = [dist.new_group(first), dist.new_group([hvd.size() - 1])]
        mine = groups[hvd.rank() not in first]
        members = first if hvd.rank() in first else [hvd.rank()]
        for name in NAMES:
            model = DistributedDataParallel(Given(), process_group=mine)
            register_comm_hook(model, name, **({"n": 1} if name == "rotate" else {}))
            applied = step_of(model, model.module.gradients(hvd.rank()))
            if name != "topk":
                for number, got in enumerate(applied):
                    each = [model.module.gradients(rank)[number] for rank in members]
                    mean = torch.stack(each).mean(0)
                    torch.testing.assert_close(got, mean, rtol=0, atol=0.03 * mean.abs().max())
                    if len(members) == 1:
                        assert_same(got, mean)


def check_gradients_without_synchronisation_add_up() -> None:
    with process_group():
        model = DistributedDataParallel(network(), **SMALL_BUCKETS)
        register_comm_hook(model, "fp16")
        first, second = batches(hvd.rank())[:2]
        with model.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        reference = network()
        for rank in range(hvd.size()):
            for batch in batches(rank)[:2]:
                (reference(batch).square().mean() / hvd.size()).backward()
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-6)


def check_uneven_numbers_of_batches() -> None:
    with process_group():
        for name in ("int8", "topk"):
            model = DistributedDataParallel(network(), **SMALL_BUCKETS)
            register_comm_hook(model, name)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with Join([model]):
                for _ in range(2 + hvd.rank()):
                    optimizer.zero_grad()
                    model(torch.ones(2, 64)).square().mean().backward()
                    optimizer.step()
            assert_same_everywhere(details(model))


def check_collectives_of_the_backward_pass_do_not_mix_with_the_hook() -> None:
    """The training thread reduces in the same group while buckets travel."""

    class Reducing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            total = torch.tensor([float(hvd.rank() + 1)])
            dist.all_reduce(total)
            assert total.item() == sum(range(1, hvd.size() + 1))
            return gradient

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = Reducing.apply(layer(x))
            return x

    for backend in BACKENDS:
        with process_group(backend):
            model = DistributedDataParallel(Layers(), **SMALL_BUCKETS)
            register_comm_hook(model, "fp16")
            train(model)
            assert_trained_alike(details(model), 1e-5)


def check_all_ranks_choose_alike() -> None:
    with process_group():
        model = DistributedDataParallel(torch.nn.Linear(1024, 512), bucket_cap_mb=1)
        state = register_comm_hook(model, "auto")
        for step in range(4):
            assert (state.choice is None) == (step < 3)
            model(torch.randn(2, 1024)).sum().backward()
        choices: list[Any] = [None] * hvd.size()
        dist.all_gather_object(choices, state.choice)
        assert set(choices) == {state.choice}
        assert state.choice in ("exact", "fp16", "int8", "topk")


def check_a_hook_outlives_its_process_group() -> None:
    """A job that begins again with the same objects: the state makes another group."""
    state = hooks.Int8State()
    for _ in range(2):
        with process_group():
            model = DistributedDataParallel(Given())
            model.register_comm_hook(state, hooks.int8_hook)
            state._known.clear()
            assert_same_everywhere(step_of(model, model.module.gradients(hvd.rank())))
