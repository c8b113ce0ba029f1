"""`compression=` of the optimizer and of allreduce, with every rank a host of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import torch
from gradient_settings import apart
from patterns import assert_job_usable, assert_same, raised, values
from torch import nn
from worlds import next_world

import perseus.torch.horovod as hvd
from perseus import basics

COUNT = 50_000


def _gradient(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(COUNT, generator=generator)


def _mean(step: int = 0) -> torch.Tensor:
    return torch.stack([_gradient(rank, step).double() for rank in range(hvd.size())]).mean(dim=0)


def _steps(
    compression: object,
    steps: int,
    gradient: Callable[[int, int], torch.Tensor] = _gradient,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[torch.Tensor]:
    """What one parameter's gradient(rank, step) is after each step of an optimizer."""
    parameter = nn.Parameter(torch.zeros(COUNT))
    options = {} if compression is None else {"compression": compression}
    optimizer = hvd.DistributedOptimizer(
        make([parameter], lr=0.125), named_parameters=[("p", parameter)], **options
    )
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        (parameter * gradient(hvd.rank(), step)).sum().backward()
        optimizer.synchronize()
        seen.append(parameter.grad.clone())
        with optimizer.skip_synchronize():
            optimizer.step()
    return seen


def _moved(
    make: Callable[..., torch.optim.Optimizer], compression: object, groups: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the results of four steps whose learning rates differ: the sum, the sum weighted by the
    rates, and the weighted sum of the exact ones. The last step sends all that is held.
    """
    rates = (0.5, 1.0, 0.25, 0.125)
    shape = (200, COUNT // 200)
    parameters = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        make([{"params": [parameters[0]]}, {"params": [parameters[1]]}], lr=7.0),
        named_parameters=[("p", parameters[0]), ("q", parameters[1])],
        compression=compression,
        groups=groups,
    )
    total, weighted, exact = torch.zeros(3, *shape, dtype=torch.float64)
    for step, rate in enumerate(rates):
        if step == len(rates) - 1:
            hvd.flush_residuals()
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = rate if groups is None else rate * (index + 1)
        optimizer.zero_grad()
        gradient = _gradient(hvd.rank(), step).reshape(shape)
        (parameters[0] * gradient + parameters[1] * gradient.flip(0)).sum().backward()
        optimizer.step()
        result = parameters[0].grad.double()
        total += result
        weighted += rate * result
        exact += rate * _mean(step).reshape(shape)
    return total, weighted, exact


class _Own(torch.optim.SGD):
    """Perhaps its steps are not proportional to gradients."""


def _same_everywhere(tensor: torch.Tensor) -> bool:
    gathered = hvd.allgather(tensor.reshape(1, -1))
    return all(torch.equal(row, gathered[0]) for row in gathered)


def check_gradients_are_float16_between_hosts_unless_told_otherwise() -> None:
    with apart():
        (half,) = _steps(None, 1)
        (asked,) = _steps(hvd.Compression.fp16, 1)
        (exact,) = _steps(hvd.Compression.none, 1)
        assert torch.equal(half, asked) and _same_everywhere(half)
        assert not torch.equal(half, exact)
        assert (half - _mean()).abs().max() < 5 * 2**-11 * 2
        assert (exact - _mean()).abs().max() < 1e-6
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        assert torch.equal(_steps(None, 1)[0], exact)
    assert (_steps(None, 1)[0] - _mean()).abs().max() < 1e-6, "one host: full precision"


def check_what_is_held_moves_parameters_as_when_it_was_held() -> None:
    """Whatever the learning rate is when it arrives, if the optimizer's steps are proportional."""
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    compression = hvd.Compression
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        produced = sum(_mean(step) for step in range(4)).reshape(200, -1)
        for codec in (compression.int8, compression.topk(0.01), compression.powersgd(2)):
            total, moved, exact = _moved(sgd, codec, None)
            assert (moved - exact).abs().max() < 1e-5, codec
            assert (total - produced).abs().max() > 1e-3, codec
            for make, groups in ((adam, None), (_Own, None), (sgd, 1)):
                total, moved, exact = _moved(make, codec, groups)
                assert (total - produced).abs().max() < 1e-4, (codec, make, groups)
                assert (moved - exact).abs().max() > 1e-3, (codec, make, groups)


def check_top_k_corrects_what_it_holds_by_the_momentum() -> None:
    """Everything has moved the parameters as far as without top-k once it has been sent."""
    rate, steps = 0.125, 8

    def end(compression: object, **options: object) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(COUNT))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=rate, momentum=0.75, **options),
            named_parameters=[("corrected", parameter)],
            compression=compression,
        )
        for step in range(steps):
            if step == steps - 1:
                hvd.flush_residuals()
            optimizer.zero_grad()
            (parameter * _gradient(hvd.rank(), step)).sum().backward()
            optimizer.step()
        return parameter.detach()

    expected = end(hvd.Compression.none)
    for correction, options, equal in (
        ("1", {}, True),
        ("1", {"nesterov": True}, False),
        ("0", {}, False),
    ):
        with apart(LIGHT_TOPK_MOMENTUM_CORRECTION=correction, LIGHT_TOPK_WARMUP_STEPS=0):
            actual = end(hvd.Compression.topk(0.05), **options)
            assert _same_everywhere(actual)
        assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3) == equal, (
            correction,
            options,
        )


def check_momentum_correction_begins_anew_after_a_step_that_is_not_applied() -> None:
    """Else what the step had sent would be missing in the optimizer's momentum ever after.

    Where the correction goes on, elements that the last step has sent move as well.
    """

    def moved(applies: bool, sums: int, fused: bool = False) -> int:
        parameter = nn.Parameter(torch.zeros(COUNT))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.125, momentum=0.75, fused=fused),
            named_parameters=[("corrected", parameter)],
            compression=hvd.Compression.topk(0.05),
        )
        for step in range(4 * sums):
            optimizer.zero_grad()
            (parameter * _gradient(hvd.rank(), step)).sum().backward()
            optimizer.synchronize()
            if step == 4 * sums - 1:
                return int(parameter.grad.count_nonzero())
            skips = not applies and step == 3 * sums - 1
            if fused:  # which GradScaler always calls
                optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(skips))
            if fused or not skips:
                before = parameter.detach().clone()
                with optimizer.skip_synchronize():
                    optimizer.step()
                assert not skips or torch.equal(parameter, before)
        raise AssertionError

    for sums in (1, 2):
        with apart(
            LIGHT_TOPK_MOMENTUM_CORRECTION=1,
            LIGHT_TOPK_WARMUP_STEPS=0,
            PERSEUS_ACCUMULATE_N_STEPS=sums,
        ):
            going_on, anew = moved(True, sums), moved(False, sums)
            if sums == 1:
                assert moved(True, sums, True) == going_on
                assert moved(False, sums, True) == anew
        assert 0 < anew <= hvd.size() * 0.05 * 1.25 * COUNT, (anew, sums)
        assert going_on > 1.3 * anew, (going_on, anew, sums)


def check_bfloat16_keeps_eight_bits() -> None:
    with apart():
        (got,) = _steps(hvd.Compression.bf16, 1)
        error = (got - _mean()).abs().max()
        assert 1e-4 < error < 5 * 2**-8 * 2 and _same_everywhere(got)


def check_allreduce_is_exact_unless_it_asks() -> None:
    with apart():
        x = _gradient(hvd.rank())
        exact = hvd.allreduce(x)
        assert (exact - _mean()).abs().max() < 1e-6
        half = hvd.allreduce(x, compression=hvd.Compression.fp16)
        assert (half - _mean()).abs().max() > 1e-6 and _same_everywhere(half)
        grouped = hvd.grouped_allreduce([x, x[:100]], compression=hvd.Compression.fp16)
        assert torch.equal(grouped[0], half) and grouped[1].shape == (100,)
        whole = hvd.allreduce(torch.arange(5) + hvd.rank(), compression=hvd.Compression.fp16)
        assert whole.dtype == torch.int64, "integers travel as they are"
        x.requires_grad_()
        hvd.allreduce(x, compression=hvd.Compression.fp16).sum().backward()
        assert torch.equal(x.grad, torch.ones(COUNT))


def check_other_floating_types_are_encoded_too() -> None:
    with apart():
        x = _gradient(hvd.rank())
        wide = hvd.allreduce(x.double(), compression=hvd.Compression.fp16)
        assert torch.equal(wide, hvd.allreduce(x, compression=hvd.Compression.fp16).double())
        short = x.bfloat16()
        coded = hvd.allreduce(short, name="short", compression=hvd.Compression.int8)
        floats = hvd.allreduce(short.float(), name="floats", compression=hvd.Compression.int8)
        assert torch.equal(coded, floats.bfloat16())


def check_auto_gives_everywhere_what_the_codec_that_it_chose_gives() -> None:
    slow = {"PERSEUS_LINK_GBIT": 0.001}
    with apart(**slow):
        whole = _steps(hvd.Compression.auto, 2)
        assert all(map(torch.equal, whole, _steps(hvd.Compression.int2, 2)))
        assert all(map(_same_everywhere, whole))
        of_adam = _steps(hvd.Compression.auto, 2, make=torch.optim.Adam)
        assert all(map(torch.equal, of_adam, _steps(hvd.Compression.int8, 2)))
    with apart(PERSEUS_LINK_GBIT=1000000):
        (exact,) = _steps(hvd.Compression.auto, 1)
        assert (exact - _mean()).abs().max() < 1e-6, "nothing pays on such links"
    text = raised(ValueError, lambda: hvd.allreduce(exact, compression=hvd.Compression.auto))
    assert "pass name=" in text


def check_own_compressors_still_work() -> None:
    class Halves(hvd.compression.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
            return tensor * 0.5, "mine"

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: str) -> torch.Tensor:
            assert ctx == "mine"
            return tensor * 2

    with apart():
        assert (_steps(Halves, 1)[0] - _mean()).abs().max() < 1e-6
        assert (
            hvd.allreduce(_gradient(hvd.rank()), compression=Halves) - _mean()
        ).abs().max() < 1e-6


def check_a_nan_comes_out_everywhere_and_does_not_stay() -> None:
    """One rank has it, in another chunk each step but the last two."""

    def gradient(rank: int, step: int) -> torch.Tensor:
        given = _gradient(rank, step)
        if step < 2 and rank == (step - 1) % hvd.size():
            given[20_000 * (step + 1)] = float("nan")
        return given

    for compression in (
        hvd.Compression.none,
        None,
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        hvd.Compression.int8,
        hvd.Compression.topk(0.01),
        hvd.Compression.topk(0.1),
    ):
        with apart():
            seen = _steps(compression, 4, gradient)
        for step, mean in enumerate(seen):
            where = mean.isnan().nonzero().flatten().tolist()
            assert where == ([20_000 * (step + 1)] if step < 2 else []), (compression, step, where)
            # NaNs have many bit patterns; those of the others are pinned by other checks.
            assert _same_everywhere(mean.nan_to_num(nan=7.0))


def check_what_makes_no_sense_is_refused() -> None:
    for bad in (0, -0.1, 1.5, "0.1", [0.1]):
        assert "fraction above 0" in raised(ValueError, lambda bad=bad: hvd.Compression.topk(bad))
    for bad in (0, 2.5, 5000):
        assert "whole number" in raised(ValueError, lambda bad=bad: hvd.Compression.rotate(bad))
    x = torch.ones(3)
    text = raised(ValueError, lambda: hvd.allreduce(x, compression=hvd.Compression.int8))
    assert "pass name=" in text
    text = raised(
        ValueError,
        lambda: hvd.allreduce(x.int(), name="i", compression=hvd.Compression.int8),
    )
    assert "is int32: int8, int4, int2, top-k, rotate and PowerSGD compress floating-point" in text
    text = raised(
        ValueError, lambda: hvd.allreduce(x, op=hvd.Max, name="m", compression=hvd.Compression.int8)
    )
    assert "use op=Sum or op=Average" in text
    assert_job_usable()


def check_other_reductions_than_sums_are_cast() -> None:
    reductions = {hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}
    for compression, dtype in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        # 1/3 and its multiples are rounded to 16 bits before they are reduced.
        everyone_has = [torch.arange(1.0, 6.0) * (rank + 1) / 3 for rank in range(hvd.size())]
        cast = torch.stack([each.to(dtype).float() for each in everyone_has])
        own = everyone_has[hvd.rank()]
        for op, reduce in reductions.items():
            expected = reduce(cast, 0).to(dtype).float()
            if op == hvd.Product and hvd.size() > 2:
                continue  # rounded between factors
            assert_same(hvd.allreduce(own, op=op, compression=compression), expected)
            pair = hvd.grouped_allreduce([own, own.int()], op=op, compression=compression)
            assert_same(pair[0], expected)
            assert_same(pair[1], reduce(torch.stack(everyone_has).int(), 0).int())
            parameter = nn.Parameter(torch.zeros(5))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), op=op, compression=compression
            )
            (parameter * own).sum().backward()
            optimizer.step()
            assert_same(parameter.grad, expected)
        combined = hvd.allreduce(own, op=hvd.Adasum, compression=compression)
        plain = hvd.allreduce(own.to(dtype), op=hvd.Adasum)
        assert_same(combined, plain.float())


# ---- what codecs hold back ----

SHAPES = {"w": (200, 100), "b": (100,)}
KEY = "perseus_residuals"


class _Training:
    """Sums of whole numbers, so that nothing is rounded: what is missing has been held back."""

    def __init__(self, compression: object = None, **options: object) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(s)) for name, s in SHAPES.items()}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=1.0, momentum=0.5),
            named_parameters=self.parameters.items(),
            compression=hvd.Compression.topk(0.02) if compression is None else compression,
            op=hvd.Sum,
            **options,
        )

    def step(self, number: int) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        for name, parameter in self.parameters.items():
            mine = values(SHAPES[name], torch.float32, hvd.rank(), number)
            (parameter * mine).sum().backward()
        self.optimizer.step()
        return {name: parameter.grad.clone() for name, parameter in self.parameters.items()}

    def held(self) -> dict[str, tuple[int, torch.Tensor]]:
        return self.optimizer.state_dict().get(KEY, {})


def _assert_nothing_missing(results: list[dict[str, torch.Tensor]]) -> None:
    for name, shape in SHAPES.items():
        produced = sum(
            values(shape, torch.float32, rank, step)
            for rank in range(hvd.size())
            for step in range(len(results))
        )
        assert torch.equal(sum(result[name] for result in results), produced)


def _assert_same_held(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, (layout, data) in expected.items():
        assert actual[name][0] == layout and torch.equal(actual[name][1], data)


def check_a_flush_sends_all_that_is_held_once() -> None:
    with apart():
        for options in ({}, {"groups": 1}):
            training = _Training(**options)
            results = [training.step(0), training.step(1)]
            held = training.held()
            assert held and all(data.any() for _, data in held.values())
            if hvd.rank() == hvd.size() - 1:
                hvd.flush_residuals()
            results.append(training.step(2))
            assert not training.held()
            hvd.flush_residuals()
            results.append(training.step(3))
            assert not training.held(), "with nothing held before"
            _assert_nothing_missing(results)
            training.step(4)
            assert training.held(), "once"


def check_a_new_parameter_inherits_nothing_that_is_held_under_its_name() -> None:
    def take_step(number: int) -> None:
        optimizer.zero_grad()
        mine = values(SHAPES["w"], torch.float32, hvd.rank(), number)
        (parameter * mine).sum().backward()
        optimizer.step()

    with apart():
        parameter = nn.Parameter(torch.zeros(SHAPES["w"]))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            compression=hvd.Compression.topk(0.02),
            op=hvd.Sum,
        )
        take_step(0)
        assert optimizer.state_dict()[KEY]
        parameter = nn.Parameter(torch.zeros(SHAPES["w"]))
        optimizer.param_groups[0]["params"][0] = parameter
        take_step(1)
        hvd.flush_residuals()
        take_step(2)
        produced = sum(
            values(SHAPES["w"], torch.float32, rank, step)
            for rank in range(hvd.size())
            for step in (1, 2)
        )
        assert torch.equal(parameter.detach(), -produced)


def check_a_change_of_codec_sends_all_that_is_held() -> None:
    with apart():
        x = values((300,), torch.float32, hvd.rank())
        exact = hvd.allreduce(x, op=hvd.Sum, name="exact")
        total = torch.zeros(300)
        compressors = [hvd.Compression.topk(0.1), *[hvd.Compression.rotate(4)] * 2]
        for compression in compressors:
            total += hvd.allreduce(x, op=hvd.Sum, name="x", compression=compression)
        assert not torch.equal(total, 3 * exact)
        total += hvd.allreduce(x, op=hvd.Sum, name="x")
        assert torch.equal(total, 4 * exact)


def check_a_checkpoint_has_what_this_rank_holds() -> None:
    with apart():
        for options in ({}, {"groups": 1}):
            training = _Training(**options)
            training.step(0)
            training.step(1)
            saved = copy.deepcopy(training.optimizer.state_dict())
            weights = {n: p.detach().clone() for n, p in training.parameters.items()}
            expected = training.step(2)
            held = training.held()

            resumed = _Training(**options)
            resumed.optimizer.load_state_dict(copy.deepcopy(saved))
            _assert_same_held(resumed.held(), saved[KEY])
            for name, parameter in resumed.parameters.items():
                parameter.data.copy_(weights[name])
            for name, result in resumed.step(2).items():
                assert torch.equal(result, expected[name])
                assert torch.equal(resumed.parameters[name], training.parameters[name])
            _assert_same_held(resumed.held(), held)

            plain = torch.optim.SGD(resumed.parameters.values(), lr=1.0, momentum=0.5)
            plain.load_state_dict(saved)
            resumed.optimizer.load_state_dict(plain.state_dict())
            assert not resumed.held(), "none in this checkpoint"
            resumed.step(3)


def check_all_ranks_may_load_what_one_has_saved() -> None:
    """What it held back counts once."""
    with apart():
        training = _Training()
        training.step(0)
        training.step(1)
        saved = hvd.broadcast_object(training.optimizer.state_dict(), root_rank=0)
        resumed = _Training()
        resumed.optimizer.load_state_dict(copy.deepcopy(saved))
        assert resumed.held().keys() == (saved[KEY].keys() if hvd.rank() == 0 else set())
        hvd.flush_residuals()
        for name, result in resumed.step(2).items():
            ranks = range(hvd.size())
            produced = sum(values(SHAPES[name], torch.float32, rank, 2) for rank in ranks)
            held = saved[KEY][name][1].sum(0).reshape(SHAPES[name])
            assert held.any() and torch.equal(result, produced + held)


def check_a_checkpoint_without_an_error_feedback_is_as_ever() -> None:
    with apart():
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            training = _Training(compression)
            training.step(0)
            assert training.optimizer.state_dict().keys() == {"state", "param_groups"}


def check_what_is_held_is_not_broadcast() -> None:
    with apart():
        training = _Training()
        training.step(0)
        held = training.held()
        assert held
        hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
        _assert_same_held(training.held(), held)


def check_a_world_is_left_while_gradients_are_under_way() -> None:
    """As when hosts have changed between backward and step: those gradients are lost, no job is."""
    count = 1 << 22
    with apart():
        parameter = nn.Parameter(torch.zeros(count))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            named_parameters=[("p", parameter)],
            compression=hvd.Compression.int8,
        )
        gradient = torch.arange(count) % 1000 * (hvd.rank() + 1.0) + 0.25
        state = hvd.elastic.TorchState(optimizer=optimizer)
        for complete in (True, False, True):
            optimizer.zero_grad()
            (parameter * gradient).sum().backward()
            hvd.barrier()  # all have submitted it, and it takes longer than this
            if complete:
                optimizer.step()
            next_world()
            state.sync()
        assert _same_everywhere(parameter.detach())
        (held,) = (entry[1] for entry in optimizer.state_dict()[KEY].values())
        assert held.shape == (2, count) and held.any()
    assert_job_usable()


def check_survivors_go_on_with_what_they_hold() -> None:
    with apart():
        straight, training = _Training(), _Training()
        expected = [straight.step(step) for step in range(3)]
        results = [training.step(0), training.step(1)]
        state = hvd.elastic.TorchState(optimizer=training.optimizer)
        held = training.held()
        training.step(2)
        with mock.patch.object(basics, "rank", lambda: -1):  # another one than in the first world
            state.restore()
        _assert_same_held(training.held(), held)
        next_world()
        state.sync()
        _assert_same_held(training.held(), held)
        results.append(training.step(2))
        assert all(torch.equal(results[2][name], x) for name, x in expected[2].items())
        next_world()  # as when hosts have changed: goes on with what there is, not what was saved
        state.sync()
        _assert_same_held(training.held(), straight.held())
        hvd.flush_residuals()
        results.append(training.step(3))
        assert not training.held()
        _assert_nothing_missing(results)
        results.append(training.step(4))
        saved = copy.deepcopy(training.optimizer.state_dict())
    # All ranks on one host, where nothing is encoded: what was held elsewhere comes along.
    training.optimizer.load_state_dict(saved)
    assert training.held()
    results.append(training.step(5))
    assert not training.held()
    _assert_nothing_missing(results)
    assert_job_usable()
