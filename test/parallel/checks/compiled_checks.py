"""torch.compile of code that calls Perseus: everything is as it is in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from patterns import assert_same, values, world_with
from torch import nn

import perseus.torch.horovod as hvd

Function = Callable[..., Any]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _assert_as_in_eager_mode(function: Function) -> None:
    """Of a function of one tensor, which returns one or several."""
    given = values((2 * hvd.size(), 3), torch.float32, hvd.rank())
    expected = _tensors(function(given))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        for found, right in zip(_tensors(compiled(given)), expected, strict=True):
            assert_same(found.detach(), right.detach())


def _reductions(**options: Any) -> list[Function]:
    return [
        lambda x: hvd.allreduce(x * 2, name="of_a_graph", **options) + 1,
        lambda x: hvd.allreduce_(x * 2, **options) + 1,
        lambda x: hvd.synchronize(hvd.allreduce_async(x * 2, **options)) + 1,
        lambda x: hvd.synchronize(hvd.allreduce_async_(x * 2, **options)) + 1,
        lambda x: hvd.grouped_allreduce([x * 2, x + 1], **options),
        lambda x: hvd.grouped_allreduce_([x * 2, x + 1], **options),
        lambda x: hvd.synchronize(hvd.grouped_allreduce_async([x * 2, x + 1], **options)),
        lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x * 2, x + 1], **options)),
    ]


def check_reductions_by_default_average() -> None:
    for function in _reductions():
        _assert_as_in_eager_mode(function)


def check_reductions_with_an_op() -> None:
    for function in _reductions(op=hvd.Sum):
        _assert_as_in_eager_mode(function)
    _assert_as_in_eager_mode(lambda x: hvd.allreduce(x * 2, op=hvd.Average))
    _assert_as_in_eager_mode(lambda x: hvd.allreduce(x * 2, average=False))


def check_other_collectives() -> None:
    last = hvd.size() - 1
    splits = torch.full((hvd.size(),), 2, dtype=torch.int32)
    functions: list[Function] = [
        lambda x: hvd.allgather(x * 2) + 1,
        lambda x: hvd.grouped_allgather([x * 2, x + 1]),
        lambda x: hvd.broadcast(x * 2, last) + 1,
        lambda x: hvd.synchronize(hvd.broadcast_async_(x * 2, last)) + 1,
        lambda x: hvd.alltoall(x * 2) + 1,
        lambda x: hvd.alltoall(x * 2, splits=splits),
        lambda x: hvd.reducescatter(x * 2) + 1,
        lambda x: hvd.grouped_reducescatter([x * 2, x + 1], op=hvd.Sum),
        lambda x: x * hvd.broadcast_object(hvd.rank() + 2, last),
        lambda x: hvd.sparse_allreduce_async((x * 2).to_sparse(), "s", hvd.Sum)().to_dense(),
    ]
    for function in functions:
        _assert_as_in_eager_mode(function)


def check_gradients_of_collectives() -> None:
    functions: list[Function] = [
        lambda x: hvd.allreduce(x * x),
        lambda x: hvd.allgather(x * x),
        lambda x: hvd.reducescatter(x * x),
        lambda x: hvd.broadcast(x * x, 0),
    ]

    def gradient(function: Function) -> Function:
        def of(given: torch.Tensor) -> torch.Tensor:
            leaf = given.clone().requires_grad_()
            result = function(leaf)
            (result * (hvd.rank() + 1)).sum().backward()
            return leaf.grad

        return of

    for function in functions:
        _assert_as_in_eager_mode(gradient(function))
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        given = values((2 * hvd.size(), 3), torch.float32, hvd.rank())
        assert_same(gradient(compiled)(given), gradient(function)(given))


# ---- DistributedOptimizer -----------------------------------------------------------------------


class _Model(nn.Module):
    """Some of its gradients are sparse if asked."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = nn.Embedding(7, 6, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.layers(self.rows(indices)).square().mean()


def _indices(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return torch.randint(0, 7, (4,), generator=generator)


def _step(optimizer: Any) -> Function:
    def step() -> None:
        optimizer.step()

    return step


def _clipped_step(optimizer: Any) -> Function:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(parameters, 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()

    return step


@contextmanager
def _without_warnings_of_steps() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    found = [str(entry.message) for entry in seen if "optimizer" in str(entry.message)]
    assert not found, found


def _optimizer(model: nn.Module, passes: int = 1, make: Function = torch.optim.SGD, **options: Any):
    return hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        compression=hvd.Compression.none,
        **options,
    )


def _trained(
    mode: Callable[[Function], Function],
    form: Function,
    sparse: bool = False,
    passes: int = 1,
    **options: Any,
) -> list[torch.Tensor]:
    """The parameters after training by form(optimizer), in a mode of torch."""
    model = _Model(sparse)
    optimizer = _optimizer(model, passes, **options)
    step = mode(form(optimizer))
    with _without_warnings_of_steps():
        for number in range(4):
            optimizer.zero_grad()
            for part in range(passes):
                model(_indices(passes * number + part)).backward()
            step()
            assert not getattr(optimizer, "_synchronized", False)
    return [parameter.detach() for parameter in model.parameters()]


def _compiled(function: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


def _assert_trained_alike(form: Function = _step, **options: Any) -> None:
    expected = _trained(lambda function: function, form, **options)
    for found, right in zip(_trained(_compiled, form, **options), expected, strict=True):
        assert_same(found, right)


def check_a_compiled_step() -> None:
    _assert_trained_alike()
    _assert_trained_alike(form=lambda optimizer: optimizer.step)
    _assert_trained_alike(make=torch.optim.Adam)


def check_a_compiled_step_of_several_backward_passes() -> None:
    _assert_trained_alike(passes=2)


def check_a_compiled_step_that_clips() -> None:
    _assert_trained_alike(form=_clipped_step)


def check_a_compiled_step_of_sums_over_steps() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        _assert_trained_alike()


def check_a_compiled_step_with_sparse_gradients() -> None:
    _assert_trained_alike(sparse=True)


def check_a_compiled_step_of_adasum() -> None:
    _assert_trained_alike(op=hvd.Adasum)


def _train_whole(mode: Callable[[Function], Function], passes: int) -> list[torch.Tensor]:
    """A mode of torch has all that a step does; also returns the averaged losses."""
    model = _Model(sparse=False)
    optimizer = _optimizer(model, passes)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        for batch in batches:
            loss = model(batch)
            loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss")

    changed = mode(step)
    with _without_warnings_of_steps():
        losses = [changed([_indices(passes * n + i) for i in range(passes)]) for n in range(4)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def check_a_whole_compiled_step() -> None:
    for passes in (1, 2):
        expected = _train_whole(lambda function: function, passes)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            found = _train_whole(lambda f, b=backend: torch.compile(f, backend=b), passes)
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
