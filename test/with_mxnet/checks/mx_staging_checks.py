"""Arrays whose memory the core cannot reach, as on GPUs: other checks, with a stand-in for them.

To MXNet, mx.cpu(0) and mx.cpu(1) are different devices, between which its engine copies as it does
between a GPU and the host. Here the core may use mx.cpu(1) alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import mx_gradient_checks
import mx_op_checks
import mx_optimizer_checks
import mx_state_checks
import mx_trainer_checks
import mxnet as mx
import pytest
from mx_values import raised

import perseus.mxnet as hvd
from perseus.mxnet import ops, staging

_HOST = mx.cpu(1)
# It looks at what is reduced beside an array whose op fails, which here keeps all arrays of a push
# as they were.
_OTHERWISE = mx_gradient_checks.check_a_nan_keeps_all_ranks_from_stepping


@contextmanager
def _all_arrays_elsewhere() -> Iterator[list[int]]:
    """Yield a list that gets the number of arrays of each op that the core is given."""
    given: list[int] = []
    handles = ops.handles

    def checked(arrays: list[mx.nd.NDArray]) -> object:
        assert all(array.ctx == _HOST for array in arrays)
        given.append(len(arrays))
        return handles(arrays)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "is_elsewhere", lambda array: array.ctx != _HOST)
        patched.setattr(staging, "host_context", lambda array: _HOST)
        patched.setattr(ops, "handles", checked)
        yield given


def _all_of(module: ModuleType) -> None:
    used = 0
    for name, check in list(vars(module).items()):  # warnings.warn() puts its registry there
        if name.startswith("check_") and check is not _OTHERWISE:
            print(f"{module.__name__}.{name}", flush=True)  # where it fails
            with _all_arrays_elsewhere() as given:
                check()
            used += len(given)
    assert used


def check_collectives() -> None:
    _all_of(mx_op_checks)


def check_gradients() -> None:
    _all_of(mx_gradient_checks)


def check_states() -> None:
    _all_of(mx_state_checks)


def check_trainers() -> None:
    _all_of(mx_trainer_checks)


def check_optimizers() -> None:
    _all_of(mx_optimizer_checks)


def check_results_are_where_the_arrays_are() -> None:
    with _all_arrays_elsewhere():
        for context in (mx.cpu(0), mx.cpu(2)):
            array = mx.nd.arange(6, ctx=context) + hvd.rank()
            others = mx.nd.zeros(6, ctx=context)
            ops.allreduce([array], [others], op=hvd.Sum)
            for result in (
                others,
                hvd.allreduce(array, op=hvd.Sum),
                hvd.allgather(array),
                hvd.broadcast(array, root_rank=1),
                hvd.alltoall(array)[0] if hvd.size() == 2 else array,
                hvd.reducescatter(array, op=hvd.Sum),
            ):
                assert result.ctx == context
            total = sum(mx.nd.arange(6) + rank for rank in range(hvd.size()))
            assert (others.asnumpy() == total.asnumpy()).all()
            assert (array.asnumpy() == (mx.nd.arange(6) + hvd.rank()).asnumpy()).all()


def check_copies_are_no_part_of_a_graph() -> None:
    with _all_arrays_elsewhere():
        weight = mx.nd.ones(3)
        weight.attach_grad()
        with mx.autograd.record():
            loss = (weight * weight).sum()
            reduced = weight * (hvd.rank() + 1)
            hvd.allreduce_(reduced, op=hvd.Sum)
            gathered = hvd.allgather(reduced)
        loss.backward()
        assert (weight.grad.asnumpy() == 2).all()
        total = sum(range(1, hvd.size() + 1))
        assert (gathered.asnumpy() == total).all()


def check_an_error_reaches_the_array_on_the_device() -> None:
    with _all_arrays_elsewhere():
        array = mx.nd.ones(3 + hvd.rank())
        hvd.allreduce_(array, op=hvd.Sum, name="of different shapes")
        assert "Mismatched ALLREDUCE tensor shapes" in raised(
            mx.base.MXNetError, array.wait_to_read
        )
        assert (array.asnumpy() == 1).all()
        again = hvd.allreduce(mx.nd.ones(3), op=hvd.Sum, name="of the same shape")
        assert (again.asnumpy() == hvd.size()).all()
