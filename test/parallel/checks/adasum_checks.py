"""Adasum on real ranks: the operation and the optimizer, against the formula in float64."""

from __future__ import annotations

import copy

import torch
from patterns import (
    assert_job_usable,
    assert_same,
    nan_check,
    raised,
    stderr_lines,
    values,
    world_with,
)

import perseus.torch.horovod as hvd
from perseus.errors import NanGradientError

# dtype, how far from float64
DTYPES = (
    (torch.float64, 1e-12),
    (torch.float32, 1e-5),
    (torch.float16, 5e-3),
    (torch.bfloat16, 4e-2),
)


def _combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    p = 1 - dot / (2 * aa) if aa > 0 else 1.0
    q = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return p * a + q * b


def adasum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    while len(vectors) > 1:
        pairs = [_combine(*vectors[i : i + 2]) for i in range(0, len(vectors) - 1, 2)]
        vectors = pairs + ([vectors[-1]] if len(vectors) % 2 else [])
    return vectors[0]


def check_the_operation_in_every_form() -> None:
    shape = (13, 5)
    parts = [values(shape, torch.float64, rank) for rank in range(hvd.size())]
    for dtype, tolerance in DTYPES:
        mine = parts[hvd.rank()].to(dtype)
        expected = adasum_of(list(parts))
        in_place = mine.clone()
        results = [
            hvd.allreduce(mine, op=hvd.Adasum, name="a"),
            hvd.allreduce_(in_place, op=hvd.Adasum, name="b"),
            *hvd.grouped_allreduce([mine, mine], op=hvd.Adasum, name="c"),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum, name="d")),
        ]
        assert results[1] is in_place
        for result in results:
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
            everyone = hvd.allgather(result[None], name="same")
            assert torch.equal(everyone, result.expand_as(everyone))


def check_what_cannot_be_combined_is_refused() -> None:
    text = raised(
        ValueError, lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    )
    assert "Adasum needs floating point tensors" in text, text
    assert_job_usable()


def _train(compression: type, passes: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model trained with it, and what its parameters must be."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    models = [copy.deepcopy(model) for _ in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
        compression=compression,
        backward_passes_per_step=passes,
    )
    alone = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            model(
                values((6, 4), torch.float32, hvd.rank(), 10 * step + part)
            ).square().sum().backward()
        optimizer.synchronize()  # does nothing
        optimizer.step()
        # The same in this process: every rank's own step from the common start, then the formula.
        before = [p.detach().clone() for p in models[0].parameters()]
        for rank, (m, o) in enumerate(zip(models, alone, strict=True)):
            o.zero_grad()
            for part in range(passes):
                batch = values((6, 4), torch.float32, rank, 10 * step + part)
                m(batch).square().sum().backward()
            o.step()
        for index, start in enumerate(before):
            ranks = [list(m.parameters())[index] for m in models]
            delta = adasum_of([(p.detach() - start).double() for p in ranks])
            for p in ranks:
                p.data.copy_(start + delta.float())
    return model, [p.detach() for p in models[0].parameters()]


def check_the_optimizer_combines_steps() -> None:
    for compression, passes, tolerance in (
        (hvd.Compression.none, 1, 1e-5),
        (hvd.Compression.none, 2, 1e-5),
        (hvd.Compression.fp16, 1, 2e-2),
    ):
        model, expected = _train(compression, passes)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(
                parameter.detach(), wanted, rtol=tolerance, atol=tolerance / 10
            )
            everyone = hvd.allgather(parameter.detach().flatten()[None], name="same")
            assert torch.equal(everyone, parameter.detach().flatten().expand_as(everyone))


def check_parameters_may_join_the_optimizer_and_leave_it() -> None:
    kept, frozen, late, gone = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": [gone]}, {"params": [kept, frozen]}], lr=1.0), op=hvd.Adasum
    )
    step = adasum_of([torch.full((2,), -rank - 1.0) for rank in range(hvd.size())])

    def take(*parameters: torch.nn.Parameter) -> None:
        optimizer.zero_grad()
        sum((p * (hvd.rank() + 1)).sum() for p in parameters).backward()
        optimizer.step()

    take(gone, kept)
    frozen.requires_grad_()
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": [late]})
    take(kept, frozen, late)
    for parameter, steps in ((gone, 1), (kept, 2), (frozen, 1), (late, 1)):
        torch.testing.assert_close(parameter.detach(), step * steps)


def check_the_optimizer_keeps_its_class_and_refuses_to_skip() -> None:
    weight = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight]), op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.Adam)

    def skip() -> None:
        with optimizer.skip_synchronize():
            pass

    assert "not supported when using Adasum" in raised(AssertionError, skip)
    # No gradient anywhere: nothing moves.
    optimizer.step()
    assert_same(weight.detach(), torch.full((2,), float(hvd.rank())))


def _steps_with_a_nan(action: str) -> None:
    """The last rank has one in the second step of three."""
    model = torch.nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
    )
    where = f"NaN in the gradient of allreduce.bias on rank {hvd.size() - 1}"
    for bad in (False, True, False):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + hvd.rank())).square().sum()
        if bad and hvd.rank() == hvd.size() - 1:
            loss = loss + model.bias[1] * float("nan")
        loss.backward()
        with stderr_lines() as lines:
            if bad and action == "raise":
                assert where in raised(NanGradientError, optimizer.step)
            else:
                optimizer.step()
        assert any(where in line for line in lines) == (bad and action != "raise"), lines
        if bad and action == "report":
            assert model.bias.isnan().any()
            return
        # Momentum that has met the NaN would show in the step after it.
        for old, now in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, now) == bad and not now.isnan().any()


def check_a_nan_is_found_and_the_step_taken_back() -> None:
    for action in ("report", "raise", "skip"):
        with world_with(**nan_check(action)):
            _steps_with_a_nan(action)
