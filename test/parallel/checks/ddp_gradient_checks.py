"""DistributedDataParallel's gradients under the settings for gradients, as in the Horovod API."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import patterns
import pytest
import torch
import torch.distributed as dist
from c10d_checks import process_group
from ddp_checks import WIDTH, assert_trained_alike, batches, details, network, train
from patterns import assert_same, let_gloo_finish, nan_check, raised, shared_folder, world_with
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import perseus.torch.horovod as hvd
from perseus.errors import NanGradientError
from perseus.torch.distributed import synchronize_parameters


@contextmanager
def apart(**settings: object) -> Iterator[None]:
    """As in patterns, with a process group."""
    with patterns.apart(**settings), process_group():
        yield


def _model(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(network(), bucket_cap_mb=0.02, **options)


def _backward(model: DistributedDataParallel, batch: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def _mean_gradients(steps: list[int]) -> list[torch.Tensor]:
    """The sums over steps of the means over ranks, from one process."""
    model = network()
    for rank in range(hvd.size()):
        for step in steps:
            (model(batches(rank)[step]).square().mean() / hvd.size()).backward()
    return [parameter.grad for parameter in model.parameters()]


def _assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        everywhere = [torch.empty_like(tensor) for _ in range(hvd.size())]
        dist.all_gather(everywhere, tensor.contiguous())
        for other in everywhere:
            assert_same(other, tensor)


def check_gradients_are_float16_between_hosts_and_exact_elsewhere() -> None:
    exact = _mean_gradients([0])
    for settings, tolerance in (({}, 2e-3), ({"PERSEUS_ALLREDUCE_DTYPE": 1}, 0.0)):
        with apart(**settings):
            found = _backward(_model(), batches(hvd.rank())[0])
            _assert_same_on_all_ranks(found)
            worst = max(
                (f - e).abs().max() / e.abs().max() for f, e in zip(found, exact, strict=True)
            )
            assert worst < max(tolerance, 1e-6)
            assert not tolerance or worst > 1e-6, "nothing was rounded"
            given = torch.full((5,), 1.0 / 3) * (hvd.rank() + 1)
            dist.all_reduce(given)
            ranks = sum(torch.full((5,), 1.0 / 3) * (r + 1) for r in range(hvd.size()))
            torch.testing.assert_close(given, ranks, rtol=1e-6, atol=0)


def check_int8_and_auto_reduce_gradients_within_their_bounds() -> None:
    int8 = {"PERSEUS_ALLREDUCE_CODEC": "int8"}
    auto = {"PERSEUS_ALLREDUCE_CODEC": "auto", "PERSEUS_LINK_GBIT": 0.001}
    exact = [_mean_gradients([step]) for step in range(4)]
    for settings, tolerance in ((int8, 0.02), (auto, 1.0)):
        with apart(**settings):
            model = _model()
            sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for step in range(4):
                found = _backward(model, batches(hvd.rank())[step])
                _assert_same_on_all_ranks(found)
                torch._foreach_add_(sums, found)
            wanted = [sum(tensors) for tensors in zip(*exact, strict=True)]
            missing = _norm(torch._foreach_sub(sums, wanted)) / _norm(wanted)
            assert 1e-6 < missing < tolerance, (settings, missing)


def _norm(tensors: list[torch.Tensor]) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors) ** 0.5


def check_every_group_of_a_process_has_a_timeline_of_its_own() -> None:
    folder = Path(shared_folder())
    log = folder / "tuned.csv"  # of the world that has the process's tuner
    log.write_text("as it was")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOROVOD_TIMELINE", str(folder / "trace.json"))
        patched.setenv("HOROVOD_AUTOTUNE_LOG", str(log))
        with process_group():
            other = dist.new_group()
            for group in (None, other):
                for _ in range(2):
                    model = DistributedDataParallel(network(), process_group=group)
                    _backward(model, batches(hvd.rank())[0])
            dist.barrier()
    hvd.barrier()
    assert log.read_text() == "as it was"
    if hvd.rank() == 0:
        files = list(folder.glob("trace*.json"))
        assert len(files) == 2
        for path in files:
            text = json.dumps(json.loads(path.read_text()))
            for name, _ in network().named_parameters():
                assert name in text
                assert f"{name} of model 2" in text


def check_gradients_are_summed_over_steps() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model = _model(**options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            before = [parameter.clone() for parameter in details(model)]
            for first in (0, 2):
                held = _backward(model, batches(hvd.rank())[first])
                assert held == [None] * len(held)
                optimizer.step()  # has nothing to do
                for parameter, old in zip(details(model), before, strict=True):
                    assert_same(parameter, old)
                sums = _backward(model, batches(hvd.rank())[first + 1])
                _assert_same_on_all_ranks(sums)
                expected = _mean_gradients([first, first + 1])
                for ours, theirs in zip(sums, expected, strict=True):
                    torch.testing.assert_close(ours, theirs)


def check_settings_act_however_the_model_is_called() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        called, replicated = _model(), replicate(network())
        for model, call in ((called, called.forward), (replicated, replicated)):
            for step in range(2):
                model.zero_grad()
                call(batches(hvd.rank())[step]).square().mean().backward()
                found = [parameter.grad for parameter in model.parameters()]
                if step == 0:
                    assert all(gradient is None for gradient in found)
            _assert_same_on_all_ranks(found)
            for ours, theirs in zip(found, _mean_gradients([0, 1]), strict=True):
                torch.testing.assert_close(ours, theirs)


class _Branches(torch.nn.Module):
    """Two layers, of which a pass uses one or both, and one that no pass uses.

    Those that belong to the second are in several orders in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(WIDTH, 3), torch.nn.Linear(WIDTH, 3)
        self.never = torch.nn.Linear(2, 2)
        image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
        parts = torch.randn(3, 4, dtype=torch.complex64).t()
        self.orders = torch.nn.ParameterList([image, parts, torch.randn(3, 4)[:, ::2]])

    def forward(self, given: torch.Tensor, used: str) -> torch.Tensor:
        total = sum(getattr(self, name)(given).square().mean() for name in used.split())
        if "second" in used:
            total = total + sum(each.abs().square().sum() for each in self.orders)
        return total


def check_a_sum_over_steps_keeps_what_its_last_step_does_not_use() -> None:
    steps = ["first", "second", "second", "first", "first second", "second"]
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        for options in ({}, {"gradient_as_bucket_view": True}):
            model = DistributedDataParallel(_Branches(), find_unused_parameters=True, **options)
            expected = _Branches()
            for number, used in enumerate(steps):
                model.zero_grad()
                model(batches(hvd.rank())[number % 4], used).backward()
                for rank in range(hvd.size()):
                    (expected(batches(rank)[number % 4], used) / hvd.size()).backward()
                if number % 2 == 0:
                    assert all(parameter.grad is None for parameter in model.parameters())
                    continue
                for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad)
                expected.zero_grad()


class _Partly(torch.nn.Module):
    """A network with a layer that DDP ignores, and one whose gradients it reduces later."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.own = torch.nn.Linear(WIDTH, WIDTH)
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.own(self.network(given))


def check_parameters_that_ddp_ignores_keep_their_gradients() -> None:
    with apart(PERSEUS_ACCUMULATE_N_STEPS=2):
        model = DistributedDataParallel(_Partly())
        for number, batch in enumerate(batches(hvd.rank())[:2]):
            model.zero_grad()
            model(batch).square().mean().backward()
            assert all((p.grad is None) == (number == 0) for p in model.module.network.parameters())
            assert all(p.grad is not None for p in model.module.own.parameters())


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.b = torch.nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.real = torch.nn.Parameter(torch.randn(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (given.to(self.w.dtype) @ self.w + self.b).abs().sum() + (given @ self.real).sum()


def complex_batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def check_complex_parameters() -> None:
    expected = Complex()
    for rank in range(hvd.size()):
        (expected(complex_batch(rank)) / hvd.size()).backward()
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        for form in ({}, {"gradient_as_bucket_view": True}):
            model = DistributedDataParallel(Complex(), **form)
            for _ in range(2):
                model.zero_grad()
                model(complex_batch(hvd.rank())).backward()
                for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad)


class ComplexBucket:
    """As versions of torch hand it over that do not make it real."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._buffer = torch.cat([p.grad.reshape(-1) for p in parameters])

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def check_a_complex_buffer_is_reduced_as_its_parts() -> None:
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        model = DistributedDataParallel(Complex())
        parameters = [model.module.w, model.module.b]
        for parameter in parameters:
            parameter.grad = parameter.detach() * (1j + hvd.rank())
        bucket = ComplexBucket(parameters)
        reduced = model._perseus.reduce(bucket).wait()
        assert reduced.data_ptr() == bucket.buffer().data_ptr()
        mean = 1j + (hvd.size() - 1) / 2
        expected = torch.cat([p.detach().reshape(-1) * mean for p in parameters])
        torch.testing.assert_close(reduced, expected)


def _loaded_from_file(model: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"perseus" not in file.getvalue(), "which a script without Perseus could not load"
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_a_copy_of_a_model_trains_as_the_model_does() -> None:
    for copied in (copy.deepcopy, _loaded_from_file):
        for trained_before in (False, True):
            with apart(PERSEUS_ALLREDUCE_DTYPE=1):
                model = _model()
                given = batches(hvd.rank())
                if trained_before:
                    _step(model, given[0])
                if hvd.rank() == 0:  # which must not change how ranks number models
                    copied(model)
                other = copied(model)
                assert type(other) is DistributedDataParallel
                assert len(other._state_dict_hooks) == len(model._state_dict_hooks)
                for each in (model, other):
                    optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
                    for batch in given:
                        each.zero_grad()
                        each(batch).square().mean().backward()
                        optimizer.step()
                assert len(other._comm_hooks) == len(model._comm_hooks) == 1
                for ours, theirs in zip(details(other), details(model), strict=True):
                    assert_same(ours, theirs)
                _assert_same_on_all_ranks(details(other))
                third = _model()
                _step(third, given[0])
                _assert_same_on_all_ranks(details(third))


def check_a_copy_of_a_model_goes_on_with_what_a_codec_holds_back() -> None:
    lossy = {"LIGHT_TOPK_ALLREDUCE": 1, "LIGHT_TOPK_RATIO": 0.1, "LIGHT_TOPK_THRESHOLD": 1024}
    with apart(**lossy):
        model = _model()
        _step(model, batches(hvd.rank())[0])
        copied, again = copy.deepcopy(model), copy.deepcopy(model)
        copied.load_state_dict(model.state_dict())
        again.load_state_dict(copied.state_dict())
        expected = model.state_dict()._metadata[""]["perseus_residuals"]["held"]
        assert expected
        for _ in range(2):
            found = again.state_dict()._metadata[""]["perseus_residuals"]["held"]
            assert found.keys() == expected.keys()
            for key, (_, data) in found.items():
                assert_same(data, expected[key][1])
            synchronize_parameters(again)  # from here on it has a number, and residuals in the core


def check_averages_of_a_model() -> None:
    with apart():
        model = _model()
        averaged = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sums = [torch.zeros_like(parameter) for parameter in details(model)]
        for batch in batches(hvd.rank()):
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            for total, parameter in zip(sums, details(model), strict=True):
                total.add_(parameter)
        for ours, total in zip(averaged.parameters(), sums, strict=True):
            torch.testing.assert_close(ours.detach(), total / len(batches(0)))
        if hvd.rank() == 0:
            with torch.no_grad():
                averaged.eval()(batches(0)[0])
        _step(_model(), batches(hvd.rank())[0])


def check_a_step_with_a_nan_is_skipped_as_a_whole() -> None:
    with world_with(**nan_check("skip")), process_group():
        model = _model()
        for step in range(3):
            batch = batches(hvd.rank())[step].clone()
            if step == 1 and hvd.rank() == hvd.size() - 1:
                batch[0, 0] = float("nan")
            found = _backward(model, batch)
            if step == 1:
                assert found == [None] * len(found)
            else:
                for ours, theirs in zip(found, _mean_gradients([step]), strict=True):
                    torch.testing.assert_close(ours, theirs)


def check_a_nan_is_an_error_and_training_goes_on() -> None:
    with world_with(**nan_check("raise")), process_group():
        model = _model()
        bad = batches(hvd.rank())[0].clone()
        if hvd.rank() == hvd.size() - 1:
            bad[0, 0] = float("nan")
        assert f"rank {hvd.size() - 1}" in raised(NanGradientError, lambda: _backward(model, bad))
        found = _backward(model, batches(hvd.rank())[1])
        for ours, theirs in zip(found, _mean_gradients([1]), strict=True):
            torch.testing.assert_close(ours, theirs)


def _change_on_last(model: DistributedDataParallel) -> None:
    if hvd.rank() == hvd.size() - 1:
        model.module[2].weight.data[1, 2] += 1e-4


def check_a_parameter_that_differs_is_named_on_all_ranks() -> None:
    given, last = batches(hvd.rank()), hvd.size() - 1
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=2), process_group():
        model = _model()
        _step(model, given[0])
        _change_on_last(model)
        _step(model, given[1])
        message = raised(dist.DistBackendError, lambda: _backward(model, given[2]))
        assert "after 2 backward passes the parameter 2.weight is not the same" in message, message
        assert f" on rank {last}); of 12 parameters 1 differs" in message, message
        _step(model, given[3])  # the group goes on
    with apart(PERSEUS_PARAMETER_CHECK_N_STEPS=2, PERSEUS_DOWNSAMPLE_N_ELEMENTS=2):
        assert "averages 1/2 of them, so PERSEUS_PARAMETER" in raised(ValueError, _model)


def check_parameters_are_compared_unless_a_rank_has_joined() -> None:
    given = batches(hvd.rank())
    with world_with(PERSEUS_PARAMETER_CHECK_N_STEPS=1), process_group():
        model = _model()
        with Join([model]):
            for batch in given[: 2 if hvd.rank() == 0 else 4]:
                _step(model, batch)
        _step(model, given[0])
        _change_on_last(model)
        message = raised(dist.DistBackendError, lambda: _backward(model, given[1]))
        assert "after 5 backward passes the parameter 2.weight is not the same" in message, message


def _pass_after_join(own: list[torch.Tensor], then: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of a pass of all ranks once each has taken its own number of batches."""
    model = _model()
    with Join([model]):
        for batch in own:
            _backward(model, batch)
    return _backward(model, then)


def check_a_step_that_a_joined_rank_does_not_apply_is_forgotten() -> None:
    """Of what rank 0 shadows, nothing may be left in the first step that it takes itself."""
    mine = batches(hvd.rank())
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        found = _pass_after_join(mine[: 2 if hvd.rank() == 0 else 3], mine[3])
        model = network()
        for rank in range(hvd.size()):
            for step in (3,) if rank == 0 else (2, 3):
                (model(batches(rank)[step]).square().mean() / hvd.size()).backward()
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)
    with world_with(**nan_check("skip")), process_group():
        bad = mine[1].clone()
        if hvd.rank() == hvd.size() - 1:
            bad[0, 0] = float("nan")
        found = _pass_after_join([mine[0]] if hvd.rank() == 0 else [mine[0], bad], mine[2])
        for ours, theirs in zip(found, _mean_gradients([2]), strict=True):
            torch.testing.assert_close(ours, theirs)


def check_what_a_codec_holds_back_is_saved_with_the_wrapper() -> None:
    lossy = {"LIGHT_TOPK_ALLREDUCE": 1, "LIGHT_TOPK_RATIO": 0.1, "LIGHT_TOPK_THRESHOLD": 1024}
    with apart(**lossy):
        model = _model()
        for batch in batches(hvd.rank())[:2]:
            _step(model, batch)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert list(model.state_dict()) == [f"module.{name}" for name in network().state_dict()]
        rest = batches(hvd.rank())[2:]
        expected = _after(model, rest)
    with apart(**lossy):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        again, plain, other = _model(), network(), _model()
        again.load_state_dict(state)
        for ours, theirs in zip(_after(again, rest), expected, strict=True):
            assert_same(ours, theirs)
        stripped = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        plain.load_state_dict(stripped)
        other.module.load_state_dict(stripped)
        without = _after(other, rest)
        assert not all(torch.equal(o, e) for o, e in zip(without, expected, strict=True))


def check_a_wrapper_is_saved_and_loaded_where_its_group_has_ended() -> None:
    with apart(LIGHT_TOPK_ALLREDUCE=1, LIGHT_TOPK_RATIO=0.1, LIGHT_TOPK_THRESHOLD=1024):
        model = _model()
        _step(model, batches(hvd.rank())[0])
        # Copies: the tensors of a state are the model's own.
        living, expected = copy.deepcopy(model.state_dict()), details(network())
        child = os.fork()
        if child == 0:
            try:
                model.load_state_dict(model.state_dict())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert living._metadata[""]["perseus_residuals"]["held"]
    assert "perseus_residuals" not in model.state_dict()._metadata[""]
    for parameter, value in zip(model.parameters(), expected, strict=True):
        parameter.data.copy_(value)
    model.load_state_dict(living)
    again = model.state_dict()
    assert again._metadata[""]["perseus_residuals"] is living._metadata[""]["perseus_residuals"]
    for name, tensor in again.items():
        assert_same(tensor, living[name])


def _step(model: DistributedDataParallel, batch: torch.Tensor) -> None:
    _backward(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)


def _after(model: DistributedDataParallel, given: list[torch.Tensor]) -> list[torch.Tensor]:
    for batch in given:
        _step(model, batch)
    return [parameter.clone() for parameter in details(model)]


def check_two_models_in_one_backward_pass() -> None:
    with process_group():
        first, second = _model(), _model()
        batch = batches(hvd.rank())[0]
        (first(batch).square().mean() + second(batch).square().mean()).backward()
        expected = _mean_gradients([0])
        for model in (first, second):
            for parameter, theirs in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, theirs)


def expect_freed(references: list[weakref.ref[object]]) -> None:
    """Once the thread that completes futures has left the last one of a model, too."""
    deadline = time.monotonic() + 60
    while any(reference() is not None for reference in references):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def check_a_model_is_freed_with_its_parameters() -> None:
    with process_group():
        model = _model()
        _backward(model, batches(hvd.rank())[0])
        gone = [weakref.ref(each) for each in (model, *model.parameters())]
        del model
        expect_freed(gone)


def check_sparse_gradients_are_averaged() -> None:
    with process_group():
        table = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.zeros_(table.weight)
        model = DistributedDataParallel(table)
        model(torch.tensor([hvd.rank(), 9])).sum().backward()
        expected = torch.zeros(10, 3)
        expected[: hvd.size()] += 1 / hvd.size()
        expected[9] += 1
        torch.testing.assert_close(table.weight.grad.to_dense(), expected)


def check_the_settings_act_on_sparse_gradients() -> None:
    def backward(row: int, factor: float) -> torch.Tensor | None:
        table.weight.grad = None
        (model(torch.tensor([row, 9])) * factor).sum().backward()
        return table.weight.grad

    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2), process_group():
        table = torch.nn.Embedding(10, 3, sparse=True)
        model = DistributedDataParallel(table)
        message = raised(dist.DistBackendError, lambda: backward(hvd.rank(), 1.0))
        assert "the gradient of weight is sparse" in message
    with world_with(**nan_check("skip")), process_group():
        table = torch.nn.Embedding(10, 3, sparse=True)
        model = DistributedDataParallel(table)
        last = hvd.rank() == hvd.size() - 1
        assert backward(hvd.rank(), float("nan") if last else 1.0) is None
        found = backward(hvd.rank(), 2.0 + hvd.rank())
        expected = torch.zeros(10, 3)
        for rank in range(hvd.size()):
            expected[[rank, 9]] += (2 + rank) / hvd.size()
        torch.testing.assert_close(found.to_dense(), expected)


def check_a_hook_of_the_script_comes_first() -> None:
    with process_group():
        model = _model()

        def double(_, bucket):  # DDP looks at annotations, and wants classes there
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0] * 2)

        model.register_comm_hook(None, double)
        found = _backward(model, batches(hvd.rank())[0])
        for ours, theirs in zip(found, _mean_gradients([0]), strict=True):
            torch.testing.assert_close(ours, theirs * 2 * hvd.size())


def check_torchs_hook_for_optimizers_in_the_backward_pass_comes_first() -> None:
    seen = []

    def instead(_, bucket):  # which needs an accelerator
        seen.append(bucket.buffer().clone())
        return default_hooks.allreduce_hook(None, bucket)

    with process_group(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            optimizer_overlap_hooks, "_apply_optim_in_backward_hook", lambda **_: instead
        )
        model = torch.nn.Linear(3, 1, bias=False)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(model)
        model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
        assert len(seen) == 1
        assert_same(seen[0], torch.full((3,), hvd.rank() + 1.0))


def check_join_by_the_ranks_that_are_left_is_refused() -> None:
    with process_group():
        model = _model()
        with (
            pytest.raises(ValueError, match="divide_by_initial_world_size=False"),
            Join([model], divide_by_initial_world_size=False),
        ):
            _backward(model, batches(hvd.rank())[0])


def check_training_is_what_it_is_without_settings() -> None:
    with world_with(PERSEUS_ALLREDUCE_DTYPE=1), process_group():
        model = _model(gradient_as_bucket_view=True)
        train(model)
        assert_trained_alike(details(model))


def check_two_hundred_steps_are_those_on_gloo():
    """Without a lossy codec; after each step, all ranks have the bits of rank 0's gradients."""
    with process_group():
        gloo = dist.new_group(backend="gloo")
        losses = {}
        for name, group in (("perseus", None), ("gloo", gloo)):
            model = _model(process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            losses[name] = []
            for batch in itertools.islice(itertools.cycle(batches(dist.get_rank())), 200):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
                for parameter in model.parameters():
                    of_rank_0 = parameter.grad.clone()
                    dist.broadcast(of_rank_0, 0)
                    assert_same(parameter.grad, of_rank_0)
        let_gloo_finish()
        assert losses["perseus"] == pytest.approx(losses["gloo"], rel=1e-4, abs=1e-6)
