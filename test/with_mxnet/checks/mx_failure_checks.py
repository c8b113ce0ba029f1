"""Errors arrive as MXNetError at the next wait, or at once as ValueError; nothing hangs."""

from __future__ import annotations

import os
import re
from functools import partial

import mxnet as mx
import numpy as np
from mx_values import assert_equal, everyone, mine, numbers, raised, usable
from worlds import world_with

import perseus.mxnet as hvd

MXNetError = mx.base.MXNetError


def check_ranks_disagree() -> None:
    rank = hvd.rank()
    ones = mx.nd.ones
    cases = {
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3, 2]": lambda: (
            hvd.allreduce(ones((3 + rank, 2)), name="shape")
        ),
        "Mismatched data types: One rank had type float32": lambda: hvd.allreduce_(
            ones((3,), dtype="float64" if rank else "float32"), name="dtype"
        ),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0": lambda: hvd.broadcast_(
            ones((3,)), rank, "root"
        ),
        "Mismatched reduction operation": lambda: hvd.grouped_allreduce(
            [ones((3,)), ones((2,))], op=hvd.Min if rank else hvd.Max, name="operation"
        )[1],
        "Mismatched ALLGATHER tensor shapes": lambda: hvd.allgather(ones((2, 2 + rank)), "columns"),
    }
    for text, function in cases.items():
        message = raised(MXNetError, lambda function=function: function().wait_to_read())
        assert text in message, message
        usable()


def check_an_error_stays_with_what_it_is_about() -> None:
    """Inputs are as they were, and the op may be tried again."""
    tensor = mine((3,))
    bad = mx.nd.ones((3 + hvd.rank(),))
    result = hvd.allreduce(bad, name="x")
    good = hvd.allreduce(tensor, name="y", op=hvd.Sum)
    later = result * 2  # has the error, too, which is raised once
    assert "Mismatched" in raised(MXNetError, later.wait_to_read)
    assert_equal(good, everyone((3,)).sum(axis=0))
    assert_equal(bad, np.ones(3 + hvd.rank()))
    assert_equal(hvd.allreduce(tensor, name="x", op=hvd.Sum), everyone((3,)).sum(axis=0))


def check_an_input_with_an_error() -> None:
    """The collective does not run: it says what is wrong with its input."""
    for wait in (
        lambda array: hvd.allreduce(array, name="x").wait_to_read(),
        lambda array: hvd.allgather(array, "x"),
        lambda array: hvd.alltoall(array, name="x"),
    ):
        broken = hvd.allreduce(mx.nd.ones((3 + hvd.rank(),)), name="broken")
        assert "Mismatched" in raised(MXNetError, lambda wait=wait, array=broken: wait(array))
        usable()


def check_requests_that_make_no_sense() -> None:
    ones = mx.nd.ones((5, 2))
    cases = {
        "broadcast received invalid root rank 7": lambda: hvd.broadcast(ones, 7).wait_to_read(),
        "not an even multiple of the number of workers": lambda: hvd.alltoall(ones),
        "Number of entries in splits does not equal number of workers": lambda: hvd.alltoall(
            ones, [5]
        ),
        "Sum of splits entries is greater than the first dimension": lambda: hvd.alltoall(
            ones, [3, 3]
        ),
    }
    for text, function in cases.items():
        assert text in raised(MXNetError, function)
    unregistered = hvd.ProcessSet([0])
    gone = hvd.ProcessSet([0])
    gone.process_set_id = 10
    cases = {
        "alltoall expects a 1D splits tensor": lambda: hvd.alltoall(
            ones, mx.nd.ones((1, 2), dtype="int32")
        ),
        "32-bit integer elements": lambda: hvd.alltoall(ones, mx.nd.array([2, 3])),
        "only supports AVERAGE and SUM": lambda: hvd.reducescatter(ones, op=hvd.Max),
        "expected mx.nd.NDArray": lambda: hvd.allreduce_(np.ones(3)),
        "tostype('default')": lambda: hvd.allreduce_(ones.tostype("row_sparse")),
        "has not been registered": lambda: hvd.allreduce(ones, process_set=unregistered),
        "does not exist any more": lambda: hvd.allreduce(ones, process_set=gone),
        "supersedes average": lambda: hvd.allreduce(ones, average=True, op=hvd.Sum),
    }
    for text, function in cases.items():
        assert text in raised(ValueError, function)
    for splits in ([2.5, 2.5], np.array([2.5, 2.5])):
        text = raised(ValueError, lambda splits=splits: hvd.alltoall(ones, splits))
        assert "32-bit integer elements" in text
    assert "1D splits" in raised(ValueError, lambda: hvd.alltoall(ones, [[2, 3]]))
    with mx.util.np_shape(True):
        scalar = mx.np.array(1.0)
        assert "a scalar lacks" in raised(ValueError, lambda: hvd.reducescatter(scalar))
    usable()


def check_outsiders_of_a_process_set() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        last = hvd.add_process_set([1])
        if hvd.rank() == 0:
            result = hvd.allreduce(mx.nd.ones((3,)), name="x", process_set=last)
            assert "Rank 0 is not a member of the provided process set" in raised(
                MXNetError, result.wait_to_read
            )
        usable()


def check_what_one_rank_alone_refuses_is_named_to_the_others() -> None:
    """They wait, and the stall watch says for whom and what; rank 0's ends the world."""
    settings = {"PERSEUS_FLIGHT_RECORDER": "off"}
    if hvd.rank() == 0:
        settings["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
        settings["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "1"
    hvd.shutdown()
    os.environ.update(settings)
    hvd.init()
    exchange = partial(hvd.alltoall, mx.nd.ones((4,)), [2, 2 + 9 * hvd.rank()], "refused by rank 1")
    if hvd.rank() == 1:
        assert "Sum of splits" in raised(MXNetError, exchange)
        exchange = hvd.allreduce(mx.nd.ones((4,)), name="what it does then").wait_to_read
    message = raised(MXNetError, exchange)
    assert re.search(r"^1: \[alltoall\.refused.by.rank.1!\]$", message, re.MULTILINE), message
    for name in settings:
        del os.environ[name]
    hvd.shutdown()
    hvd.init()
    usable()


def check_ops_outside_of_a_world() -> None:
    hvd.shutdown()
    ones = mx.nd.ones((3,))
    for function in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall):
        message = raised(MXNetError, partial(function, ones))
        assert "Horovod has not been initialized; use hvd.init()." in message
    named = hvd.allreduce(ones, name="x")
    assert "has not been initialized" in raised(MXNetError, named.wait_to_read)
    hvd.init()
    usable()


def check_a_world_that_was_shut_down_ends_what_is_pending() -> None:
    """Rank 1 leaves while rank 0 waits for it."""
    if hvd.rank() == 0:
        pending = hvd.allreduce(mx.nd.ones((3,)), name="nobody else has it")
        assert "Horovod has been shut down" in raised(MXNetError, pending.wait_to_read)
        later = hvd.allreduce_(mx.nd.ones((3,)), name="later")
        assert "Horovod has been shut down" in raised(MXNetError, later.wait_to_read)
        assert "Horovod has been shut down" in raised(
            MXNetError, partial(hvd.allgather, mx.nd.ones((3,)))
        )
    hvd.shutdown()
    hvd.init()
    usable()


def check_shutdown_with_ops_in_flight() -> None:
    """Both ranks leave at once; what was pushed ends, with a result or an error."""
    pushed = [hvd.allreduce(mine((100,), salt=i), name=f"t{i}", op=hvd.Sum) for i in range(50)]
    hvd.shutdown()
    for salt, array in enumerate(pushed):
        try:
            array.wait_to_read()
        except MXNetError as error:
            assert "Horovod has" in str(error), error
        else:
            assert_equal(array, sum(numbers((100,), rank, salt) for rank in range(2)))
    hvd.init()
    usable()
