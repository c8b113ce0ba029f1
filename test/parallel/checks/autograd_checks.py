"""Differentiable collectives against the formulas of their gradients."""

from __future__ import annotations

import torch
from patterns import assert_same, values

import perseus.torch.horovod as hvd


def _leaf(shape: tuple[int, ...], rank: int | None = None) -> torch.Tensor:
    rank = hvd.rank() if rank is None else rank
    return values(shape, torch.float64, rank).requires_grad_()


def _weights(shape: tuple[int, ...], rank: int, salt: int = 5) -> torch.Tensor:
    """What the output is multiplied by on a rank, which is the gradient that comes back."""
    return values(shape, torch.float64, rank, salt)


def _mean_weights(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([_weights(shape, r) for r in range(hvd.size())]).mean(0)


def check_allreduce_gradient_is_the_same_allreduce() -> None:
    for op, pre, post in ((hvd.Average, 1.0, 1.0), (hvd.Sum, 1.0, 1.0), (hvd.Sum, 0.5, 4.0)):
        x = _leaf((5, 3))
        y = hvd.allreduce(x, op=op, prescale_factor=pre, postscale_factor=post)
        assert y.requires_grad
        (y * _weights((5, 3), hvd.rank())).sum().backward()
        factor = pre * post * (hvd.size() if op == hvd.Sum else 1)
        torch.testing.assert_close(x.grad, _mean_weights((5, 3)) * factor)


def check_allreduce_of_ones() -> None:
    x = torch.ones(4, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad.tolist() == [float(hvd.size())] * 4
    x = torch.ones(4, requires_grad=True)
    hvd.allreduce(x).sum().backward()
    assert x.grad.tolist() == [1.0] * 4


def check_grouped_allreduce_gradients() -> None:
    xs = [_leaf((3,)), _leaf((2, 2))]
    ys = hvd.grouped_allreduce(xs, op=hvd.Sum)
    sum((y * _weights(y.shape, hvd.rank())).sum() for y in ys).backward()
    for x in xs:
        torch.testing.assert_close(x.grad, _mean_weights(tuple(x.shape)) * hvd.size())


def check_allgather_gradient_is_this_ranks_slice_of_the_mean() -> None:
    rows = [r + 1 for r in range(hvd.size())]
    x = _leaf((rows[hvd.rank()], 2))
    y = hvd.allgather(x)
    (y * _weights(tuple(y.shape), hvd.rank())).sum().backward()
    torch.testing.assert_close(x.grad, _mean_weights(tuple(y.shape)).split(rows)[hvd.rank()])


def check_grouped_allgather_gradients() -> None:
    rows = [r + 1 for r in range(hvd.size())]
    xs = [_leaf((rows[hvd.rank()], 2)), _leaf((2,))]
    ys = hvd.grouped_allgather(xs)
    sum((y * _weights(tuple(y.shape), hvd.rank())).sum() for y in ys).backward()
    means = [_mean_weights(tuple(y.shape)) for y in ys]
    torch.testing.assert_close(xs[0].grad, means[0].split(rows)[hvd.rank()])
    torch.testing.assert_close(xs[1].grad, means[1].split(2)[hvd.rank()])


def check_broadcast_gradient_goes_to_the_root() -> None:
    root = hvd.size() - 1
    x = _leaf((4,))
    y = hvd.broadcast(x, root)
    assert_same(y.detach(), values((4,), torch.float64, root))
    (y * _weights((4,), hvd.rank())).sum().backward()
    right = _mean_weights((4,)) if hvd.rank() == root else torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(x.grad, right)


def check_alltoall_gradient_goes_back_where_the_rows_came_from() -> None:
    n, rank = hvd.size(), hvd.rank()
    splits = [[r + d for d in range(n)] for r in range(n)]
    x = _leaf((sum(splits[rank]) + 1, 2))
    y, received = hvd.alltoall(x, splits[rank])
    assert not received.requires_grad
    (y * _weights(tuple(y.shape), rank)).sum().backward()
    parts = []
    for d in range(n):
        came = [splits[r][d] for r in range(n)]
        parts.append(_weights((sum(came), 2), d).split(came)[rank])
    # The last row was not sent.
    assert_same(x.grad, torch.cat([*parts, torch.zeros(1, 2, dtype=torch.float64)]))
    x = _leaf((2 * n,))
    hvd.alltoall(x).sum().backward()
    assert x.grad.tolist() == [1.0] * (2 * n)


def check_reducescatter_gradient_is_gathered() -> None:
    n, rank = hvd.size(), hvd.rank()
    rows = 2 * n + 1
    sizes = [rows // n + (r < rows % n) for r in range(n)]
    gathered = torch.cat([_weights((sizes[r], 3), r) for r in range(n)])
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(n))):
        x = _leaf((rows, 3))
        y = hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=4.0)
        (y * _weights(tuple(y.shape), rank)).sum().backward()
        torch.testing.assert_close(x.grad, gathered * factor * 2.0)
    xs = [_leaf((rows, 3)), _leaf((n,))]
    ys = hvd.grouped_reducescatter(xs, op=hvd.Sum)
    sum((y * _weights(tuple(y.shape), rank)).sum() for y in ys).backward()
    torch.testing.assert_close(xs[0].grad, gathered * n)


def check_without_grad_nothing_is_recorded() -> None:
    x = _leaf((3,))
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad


def check_gradients_against_finite_differences() -> None:
    assert_gradients_are_slopes(hvd.global_process_set)


def assert_gradients_are_slopes(process_set: hvd.ProcessSet) -> None:
    """Of the sum of all members' losses; gradients are it times a known factor."""
    n, rank = process_set.size(), process_set.rank()
    splits = [(rank + d) % 3 for d in range(n)]
    inside = {"process_set": process_set}
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0, **inside}
    root = process_set.ranks[-1]
    # What is called, rows on this rank, what the gradient is of the slope.
    table = [
        (lambda x: [hvd.allreduce(x, op=hvd.Sum, **scales)], 5, 1),
        (lambda x: [hvd.allreduce(x, **scales)], 5, 1),
        (lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum, **scales), 4, 1),
        (lambda x: [hvd.allgather(x, **inside)], rank, 1 / n),
        (lambda x: hvd.grouped_allgather([x, x[1:]], **inside), rank + 1, 1 / n),
        (lambda x: [hvd.broadcast(x, root, **inside)], 3, 1 / n),
        (lambda x: [hvd.alltoall(x, splits, **inside)[0]], sum(splits) + 1, 1),
        (lambda x: [hvd.alltoall(x, **inside)], 2 * n, 1),
        (lambda x: [hvd.reducescatter(x, op=hvd.Sum, **scales)], 2 * n - 1, n),
        (lambda x: [hvd.reducescatter(x, **scales)], 1, n),
        (lambda x: hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum, **inside), n + 1, n),
    ]
    for index, (function, rows, factor) in enumerate(table):
        x = values((rows, 2), torch.float64, rank, salt=index).requires_grad_()
        direction = values((rows, 2), torch.float64, rank, salt=index + 1)

        def loss(x: torch.Tensor, function=function, index=index) -> torch.Tensor:
            return sum(
                (torch.sin(y) * values(tuple(y.shape), torch.float64, rank, salt=index + 2))
                .sum() for y in function(x)
            )  # fmt: skip

        loss(x).backward()
        step = 1e-5
        with torch.no_grad():
            slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
        both = torch.stack([slope, (x.grad * direction).sum()])
        total, along = hvd.allreduce(both, op=hvd.Sum, name=f"slope.{index}", **inside).tolist()
        assert abs(along - total * factor) < 1e-6 * (1 + abs(total * factor)), (index, along, total)


def check_other_reductions_apply_themselves_to_the_gradient() -> None:
    for op, reduce in ((hvd.Min, torch.amin), (hvd.Max, torch.amax), (hvd.Product, torch.prod)):
        x, group = _leaf((4, 2)), [_leaf((3,)), _leaf((2, 2))]
        for leaf, y in zip(
            [x, *group],
            [hvd.allreduce(x, op=op, prescale_factor=2.0), *hvd.grouped_allreduce(group, op=op)],
            strict=True,
        ):
            shape = tuple(leaf.shape)
            (y * _weights(shape, hvd.rank())).sum().backward()
            everyone = torch.stack([_weights(shape, r) for r in range(hvd.size())])
            assert_same(leaf.grad, reduce(everyone * (2.0 if leaf is x else 1.0), dim=0))


def check_gradients_can_be_differentiated_again() -> None:
    """y = f(x) is linear with the gradient g: d(sum of g²)/dw, and no rank waits for another."""
    n, rank = hvd.size(), hvd.rank()
    for name, function in (
        ("allreduce", lambda x: hvd.allreduce(x, op=hvd.Sum)),
        ("grouped_allreduce", lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0]),
        ("allgather", hvd.allgather),
        ("broadcast", lambda x: hvd.broadcast(x, 0)),
        ("alltoall", hvd.alltoall),
        ("reducescatter", lambda x: hvd.reducescatter(x, op=hvd.Sum)),
    ):
        x = _leaf((n, 2))
        y = function(x)
        w = _weights(tuple(y.shape), rank).requires_grad_()
        (gradient,) = torch.autograd.grad((y * w).sum(), x, create_graph=True)
        assert gradient.requires_grad, name
        (gradient**2).sum().backward()
        assert w.grad is not None and bool(torch.isfinite(w.grad).all()), name
        if name == "allreduce":
            everyone = torch.stack([_weights((n, 2), r) for r in range(n)]).sum(0)
            torch.testing.assert_close(w.grad, 2 * n * everyone)
        if name == "broadcast":  # only the root's gradient is not zero
            mean = torch.stack([_weights((n, 2), r) for r in range(n)]).mean(0)
            torch.testing.assert_close(w.grad, 2 * mean / n)


def check_members_without_gradient_and_whole_numbers_in_a_group() -> None:
    n = hvd.size()
    for function in (
        lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.grouped_allgather,
        lambda tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum),
    ):
        x, constant = _leaf((n,)), values((n,), torch.float64, hvd.rank())
        whole = values((n,), torch.int64, hvd.rank())
        first, second, third = function([x, constant, whole])
        assert not third.requires_grad
        (first.sum() * 2 + second.sum()).backward()
        assert x.grad is not None and x.grad.shape == x.shape
        # An output that the loss does not use counts with zeros.
        x, unused = _leaf((n,)), _leaf((n,))
        function([x, unused])[0].sum().backward()
        assert_same(unused.grad, torch.zeros(n, dtype=torch.float64))


def check_gradients_of_other_dtypes_layouts_and_compression() -> None:
    n = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for function in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16),
            lambda x: hvd.grouped_allreduce(
                [x], op=hvd.Sum, compression=hvd.Compression.fp16
            )[0],
        ):  # fmt: skip
            x = values((2, 3, 4, 4), dtype, hvd.rank()).to(memory_format=torch.channels_last)
            x.requires_grad_()
            y = function(x)
            assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
            y.sum().backward()  # the gradient is one number, expanded
            assert_same(x.grad, torch.full((2, 3, 4, 4), float(n), dtype=dtype))
    x = _leaf((n, 3))
    hvd.reducescatter(x, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
    assert_same(x.grad, torch.full((n, 3), float(n), dtype=torch.float64))


def check_the_incoming_gradient_is_not_changed() -> None:
    n = hvd.size()
    for function in (
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=3.0),
        lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum, prescale_factor=3.0)[0],
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.allreduce(x, op=hvd.Sum),
    ):
        y = function(_leaf((n, 2)))
        incoming = _weights(tuple(y.shape), hvd.rank())
        y.backward(incoming)
        assert_same(incoming, _weights(tuple(y.shape), hvd.rank()))
