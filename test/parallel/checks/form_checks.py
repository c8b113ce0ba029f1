"""Every collective in every form, dtype and dense layout, against float64 and int64 references.

A form takes tensors and gives the results in their order: one by one or as a group, waited for at
once or later, into new tensors or in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from patterns import (
    ALL,
    FLOATS,
    assert_job_usable,
    assert_same,
    everyone,
    raised,
    values,
    world_with,
)

import perseus.torch.horovod as hvd

Tensors = list[torch.Tensor]
SHAPES = [(7, 3), (5,)]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
FACTORS = [(1.0, 1.0), (0.5, 3.0), (1.5, 0.5)]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-14}


@dataclass(frozen=True)
class Form:
    """A way to call a collective; `group` and `in_place` say what it takes and gives back."""

    function: Callable[..., Any]
    asynchronous: bool = False
    group: bool = False
    in_place: bool = False

    def run(self, tensors: Tensors, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """The results, after checking that inputs are untouched, or are the results."""
        before = [tensor.clone() for tensor in tensors]
        if self.group:
            given = self.function(tensors, *arguments, name=name, **options)
            results = list(hvd.synchronize(given) if self.asynchronous else given)
        else:
            results = [
                self.function(tensor, *arguments, name=f"{name}.{i}", **options)
                for i, tensor in enumerate(tensors)
            ]
            if self.asynchronous:
                results = [hvd.synchronize(handle) for handle in results]
        assert len(results) == len(tensors)
        for result, tensor, old in zip(results, tensors, before, strict=True):
            if self.in_place:
                assert result is tensor
            else:
                assert result is not tensor
                assert_same(tensor, old)
        return results


ALLREDUCE = [
    Form(hvd.allreduce),
    Form(hvd.allreduce_, in_place=True),
    Form(hvd.allreduce_async, asynchronous=True),
    Form(hvd.allreduce_async_, asynchronous=True, in_place=True),
    Form(hvd.grouped_allreduce, group=True),
    Form(hvd.grouped_allreduce_, group=True, in_place=True),
    Form(hvd.grouped_allreduce_async, asynchronous=True, group=True),
    Form(hvd.grouped_allreduce_async_, asynchronous=True, group=True, in_place=True),
]
ALLGATHER = [
    Form(hvd.allgather),
    Form(hvd.allgather_async, asynchronous=True),
    Form(hvd.grouped_allgather, group=True),
    Form(hvd.grouped_allgather_async, asynchronous=True, group=True),
]
BROADCAST = [
    Form(hvd.broadcast),
    Form(hvd.broadcast_, in_place=True),
    Form(hvd.broadcast_async, asynchronous=True),
    Form(hvd.broadcast_async_, asynchronous=True, in_place=True),
]
ALLTOALL = [Form(hvd.alltoall), Form(hvd.alltoall_async, asynchronous=True)]
REDUCESCATTER = [
    Form(hvd.reducescatter),
    Form(hvd.reducescatter_async, asynchronous=True),
    Form(hvd.grouped_reducescatter, group=True),
    Form(hvd.grouped_reducescatter_async, asynchronous=True, group=True),
]


def cases(forms: list[Form]) -> Iterator[tuple[torch.dtype, Form, str]]:
    for dtype in ALL:
        for form in forms:
            yield dtype, form, f"{form.function.__name__}.{dtype}"


def tensors_of(rank: int, dtype: torch.dtype, rows: int = 0) -> Tensors:
    """A rank's tensors; with `rows`, that many in the first dimension of each."""
    shapes = [(rows, *shape[1:]) if rows else shape for shape in SHAPES]
    return [values(shape, dtype, rank, salt=i) for i, shape in enumerate(shapes)]


def _scaled(tensor: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Integers are scaled in float64 and truncated towards zero."""
    if factor == 1.0:
        return tensor
    scaled = tensor.to(torch.float64) * factor
    return scaled if dtype.is_floating_point else scaled.trunc().to(torch.int64)


def reference(
    index: int,
    dtype: torch.dtype,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    members: list[int] | None = None,
) -> torch.Tensor:
    """The reduction of the members' tensors number `index` (None = all ranks'), exact."""
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    ranks = list(range(hvd.size())) if members is None else members
    stack = torch.stack([tensors_of(r, dtype)[index] for r in ranks])
    if dtype == torch.bool:
        return stack.any(0) if op in (hvd.Sum, hvd.Max) else stack.all(0)
    stack = _scaled(stack.to(exact), prescale, dtype)
    if op == hvd.Average:
        mean = stack.sum(0).to(torch.float64) * postscale / len(ranks)
        return mean if dtype.is_floating_point else mean.trunc().to(torch.int64)
    functions = {hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}
    result = functions.get(op, torch.sum)(stack, dim=0)
    if not dtype.is_floating_point:
        result = result.to(dtype)  # sums and products wrap before they are scaled
    return _scaled(result, postscale, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.shape == expected.shape
    if dtype in FLOATS:
        tolerance = ROUNDING[dtype]
        torch.testing.assert_close(
            actual.to(torch.float64), expected, rtol=tolerance, atol=tolerance
        )
    else:
        assert_same(actual, expected.to(dtype))


def check_allreduce() -> None:
    for dtype, form, name in cases(ALLREDUCE):
        for op in OPS:
            if dtype == torch.bool and op == hvd.Average:
                continue
            results = form.run(tensors_of(hvd.rank(), dtype), f"{name}.{op}", op=op)
            for i, result in enumerate(results):
                assert_close(result, reference(i, dtype, op), dtype)


def check_allreduce_with_factors() -> None:
    for index, (dtype, form, name) in enumerate(cases(ALLREDUCE)):
        if dtype == torch.bool:
            continue
        for turn, (pre, post) in enumerate(FACTORS[1:]):  # the operations take turns
            op = OPS[(index + 2 * turn) % len(OPS)]
            if op == hvd.Product and dtype in (torch.uint8, torch.int8):
                op = hvd.Average  # products leave the range, where the nearest limit is taken
            results = form.run(
                tensors_of(hvd.rank(), dtype), f"{name}.{op}.{pre}", op=op, prescale_factor=pre,
                postscale_factor=post,
            )  # fmt: skip
            for i, result in enumerate(results):
                assert_close(result, reference(i, dtype, op, pre, post), dtype)


def check_averages_of_bools_are_refused_in_every_form() -> None:
    for form in [*ALLREDUCE, *REDUCESCATTER]:
        flags = [torch.tensor([True, False])] if form.group else torch.tensor([True, False])
        text = raised(
            ValueError, lambda form=form, flags=flags: form.function(flags, op=hvd.Average)
        )
        assert "Average is not defined for bool" in text and "op=Max (or)" in text
    assert_job_usable()


def check_allgather() -> None:
    for dtype, form, name in cases(ALLGATHER):
        for rows in (lambda r: r + 1, lambda r: 2 * (r == 0)):
            everyone = [_rows_of(r, dtype, rows(r)) for r in range(hvd.size())]
            results = form.run(everyone[hvd.rank()], name)
            for i, result in enumerate(results):
                assert_same(result, torch.cat([tensors[i] for tensors in everyone]))


def check_allgather_stacks_where_it_is_told_to() -> None:
    """PERSEUS_CHANGE_HVD_ALLGATHER; objects, and what normalises batches, are gathered as ever."""
    own = values((2, 3), torch.float32, hvd.rank())
    everyone = [values((2, 3), torch.float32, r) for r in range(hvd.size())]
    with world_with(PERSEUS_CHANGE_HVD_ALLGATHER=0):
        for form in ALLGATHER:
            for right, tensor in (
                (torch.stack(everyone), own),
                (torch.arange(hvd.size()), torch.tensor(hvd.rank())),
            ):
                assert_same(
                    form.run([tensor], f"stacked.{form.function.__name__}.{tensor.dim()}")[0], right
                )
        weights = own.clone().requires_grad_()
        factors = torch.arange(float(hvd.size())).reshape(-1, 1, 1) + 1
        (hvd.allgather(weights, name="graph") * factors).sum().backward()
        assert_same(weights.grad, torch.full((2, 3), hvd.rank() + 1.0))
        text = raised(
            RuntimeError, lambda: hvd.allgather(torch.ones(hvd.rank() + 1), name="uneven")
        )
        assert "shape" in text, text
        assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]
        batch = torch.arange(4.0).reshape(2, 2) + 7 * hvd.rank()
        joined = torch.cat([torch.arange(4.0).reshape(2, 2) + 7 * r for r in range(hvd.size())])
        right = torch.nn.BatchNorm1d(2)(joined)[2 * hvd.rank() : 2 * hvd.rank() + 2]
        torch.testing.assert_close(hvd.SyncBatchNorm(2)(batch), right)
    with world_with(PERSEUS_CHANGE_HVD_ALLGATHER=1):
        assert_same(hvd.allgather(own, name="joined"), torch.cat(everyone))


def _rows_of(rank: int, dtype: torch.dtype, rows: int) -> Tensors:
    return [tensor[:rows].clone() for tensor in tensors_of(rank, dtype, hvd.size() + 1)]


def check_broadcast() -> None:
    for dtype, form, name in cases(BROADCAST):
        root = hvd.size() - 1
        results = form.run(tensors_of(hvd.rank(), dtype), name, root)
        for result, right in zip(results, tensors_of(root, dtype), strict=True):
            assert_same(result, right)


def check_alltoall() -> None:
    n, rank = hvd.size(), hvd.rank()
    for dtype, form, name in cases(ALLTOALL):
        everyone = [tensors_of(r, dtype, rows=2 * n) for r in range(n)]
        results = form.run(everyone[rank], name)
        for i, result in enumerate(results):
            parts = [tensors[i][2 * rank : 2 * rank + 2] for tensors in everyone]
            assert_same(result, torch.cat(parts))


def check_alltoall_with_splits() -> None:
    n, rank = hvd.size(), hvd.rank()
    splits = [[(r + 2 * d) % 3 for d in range(n)] for r in range(n)]
    for dtype, form, name in cases(ALLTOALL):
        everyone = [tensors_of(r, dtype, rows=2 * n + 1) for r in range(n)]
        results = form.run(everyone[rank], name, splits[rank])
        for i, (result, received) in enumerate(results):
            parts = []
            for r in range(n):
                first = sum(splits[r][:rank])
                parts.append(everyone[r][i][first : first + splits[r][rank]])
            assert_same(result, torch.cat(parts))
            assert_same(
                received, torch.tensor([splits[r][rank] for r in range(n)], dtype=torch.int32)
            )


def check_reducescatter() -> None:
    for dtype, form, name in cases(REDUCESCATTER):
        for op in (hvd.Average, hvd.Sum):
            for pre, post in FACTORS:
                if dtype == torch.bool and (op == hvd.Average or pre != 1.0):
                    continue
                results = form.run(
                    tensors_of(hvd.rank(), dtype), f"{name}.{op}.{pre}", op=op, prescale_factor=pre,
                    postscale_factor=post,
                )  # fmt: skip
                for i, result in enumerate(results):
                    assert_close(result, own_rows(reference(i, dtype, op, pre, post)), dtype)


def own_rows(whole: torch.Tensor, process_set: Any = hvd.global_process_set) -> torch.Tensor:
    """What reducescatter leaves to this rank."""
    n = process_set.size()
    return whole.split([whole.shape[0] // n + (r < whole.shape[0] % n) for r in range(n)])[
        process_set.rank()
    ]


def check_a_group_of_every_dtype_at_once() -> None:
    n, rank = hvd.size(), hvd.rank()
    everyone = [[values((n + 1, 2), dtype, r) for dtype in ALL] for r in range(n)]
    for form in [*ALLREDUCE, *ALLGATHER, *REDUCESCATTER]:
        if not form.group:
            continue
        reduces = form not in ALLGATHER
        tensors = [tensor.clone() for tensor in everyone[rank]]
        options = {"op": hvd.Sum} if reduces else {}
        results = form.run(tensors, f"mixed.{form.function.__name__}", **options)
        for i, (dtype, result) in enumerate(zip(ALL, results, strict=True)):
            parts = [parts[i] for parts in everyone]
            if not reduces:
                assert_same(result, torch.cat(parts))
                continue
            total = torch.stack(parts).to(torch.float64).sum(0)
            total = total != 0 if dtype == torch.bool else total.to(dtype)
            assert_same(result, own_rows(total) if form in REDUCESCATTER else total)


def check_strides_of_single_elements_do_not_matter() -> None:
    shape = (2, 3, 1, 5)
    expected = everyone(shape, torch.float32).sum(0).to(torch.float32)
    mine = values(shape, torch.float32, hvd.rank()).to(memory_format=torch.channels_last)
    odd = mine.as_strided(shape, (15, 1, 1 if hvd.rank() else 15, 3))
    assert_same(hvd.allreduce(odd, op=hvd.Sum, name="odd_stride"), expected)
    assert_same(hvd.allreduce_(odd, op=hvd.Sum, name="odd_stride_"), expected)


def check_transposed_and_other_dense_layouts() -> None:
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)):
        shape = tuple((4, 3, 5)[i] for i in order)
        mine = values((4, 3, 5), torch.int32, hvd.rank()).permute(order)
        assert mine.shape == shape
        expected = everyone((4, 3, 5), torch.int32).sum(0).to(torch.int32).permute(order)
        result = hvd.allreduce(mine, op=hvd.Sum, name=f"permuted.{order}")
        assert result.stride() == mine.stride()
        assert_same(result, expected)
        for member in hvd.grouped_allreduce([mine, mine.clone()], op=hvd.Sum):
            assert_same(member, expected)
        copied = hvd.broadcast(mine, hvd.size() - 1, name=f"permuted.{order}")
        last = values((4, 3, 5), torch.int32, hvd.size() - 1).permute(order)
        assert_same(copied, last)
        assert_same(hvd.broadcast_(mine, hvd.size() - 1, name=f"permuted_.{order}"), last)
