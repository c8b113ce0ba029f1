"""DistributedDataParallel's gradients under the settings for gradients, as in the Horovod API."""

from __future__ import annotations

import gc
import io
import itertools
import json
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
from ddp_checks import assert_trained_alike, batches, details, network, train
from patterns import assert_same, let_gloo_finish, nan_check, shared_folder, world_with
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.horovod as hvd


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
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOROVOD_TIMELINE", str(folder / "trace.json"))
        with process_group():
            other = dist.new_group()
            for group in (None, other):
                for _ in range(2):
                    model = DistributedDataParallel(network(), process_group=group)
                    _backward(model, batches(hvd.rank())[0])
            dist.barrier()
    hvd.barrier()
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
