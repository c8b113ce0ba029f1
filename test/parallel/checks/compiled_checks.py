"""torch.compile of code that calls Perseus: everything is as it is in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from patterns import assert_same, values

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
