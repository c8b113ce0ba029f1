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
