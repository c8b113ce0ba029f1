"""Ranks that disagree: the same error on every rank, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from patterns import assert_job_usable, raised

import perseus.torch.horovod as hvd


def _mismatch(mine: Callable[[], object], *fragments: str) -> None:
    """`mine` fails on every rank with one of the fragments (which rank is named first may vary)."""
    text = raised(hvd.HorovodInternalError, mine)
    assert any(fragment in text for fragment in fragments), text
    texts = hvd.allgather_object(text, name="texts")
    assert texts == [text] * hvd.size(), texts
    assert_job_usable()


def _last() -> bool:
    return hvd.rank() == hvd.size() - 1


def check_dtype() -> None:
    dtype = torch.int32 if _last() else torch.float32
    _mismatch(
        lambda: hvd.allreduce(torch.ones(3, dtype=dtype), name="m.dtype"),
        "Mismatched data types: One rank had type float32, but another rank had type int32.",
        "Mismatched data types: One rank had type int32, but another rank had type float32.",
    )


def check_kind_of_operation() -> None:
    # A name of the core begins with its kind, so only a crafted one can belong to two kinds:
    # "allreduce" + ".x" is what a barrier, whose kind has no prefix, may be called too.
    from perseus.torch.session import BARRIER, session

    def mine() -> None:
        if _last():
            handle = session.submit(BARRIER, "allreduce.m.kind", None)
        else:
            handle = hvd.allreduce_async(torch.ones(3), name="m.kind")
        hvd.synchronize(handle)

    _mismatch(
        mine,
        "Mismatched operations: One rank did an ALLREDUCE, but another rank did an BARRIER.",
        "Mismatched operations: One rank did an BARRIER, but another rank did an ALLREDUCE.",
    )


def check_shape() -> None:
    shape = (18, 3) if _last() else (17, 3)
    for grouped in (False, True):
        tensor = torch.ones(shape)
        call = (
            (lambda tensor=tensor: hvd.grouped_allreduce([tensor, torch.ones(2)], name="m.group"))
            if grouped
            else (lambda tensor=tensor: hvd.allreduce(tensor, name="m.shape"))
        )
        _mismatch(
            call,
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [17, 3], but "
            "another rank sent a tensor of shape [18, 3].",
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [18, 3], but "
            "another rank sent a tensor of shape [17, 3].",
        )


def check_number_of_dimensions() -> None:
    shape = (2, 3) if _last() else (6,)
    _mismatch(
        lambda: hvd.allreduce(torch.ones(shape), name="m.dims"),
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [6], but another "
        "rank sent a tensor of shape [2, 3].",
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but another "
        "rank sent a tensor of shape [6].",
    )


def check_scale_factors() -> None:
    factor = 0.5 if _last() else 1.0
    for key in ("prescale_factor", "postscale_factor"):
        _mismatch(
            lambda key=key: hvd.allreduce(torch.ones(2), name=f"m.{key}", **{key: factor}),
            "Mismatched prescale and/or postscale factors:",
        )


def check_reduction() -> None:
    op = hvd.Min if _last() else hvd.Sum
    _mismatch(
        lambda: hvd.allreduce(torch.ones(2), name="m.op", op=op),
        "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent "
        "reduction op 3.",
        "Mismatched reduction operation: One rank sent reduction op 3, but another rank sent "
        "reduction op 1.",
    )


def check_allgather_of_a_scalar() -> None:
    _mismatch(
        lambda: hvd.synchronize(hvd.allgather_async(torch.tensor(1.0), name="m.scalar")),
        "Process-set rank zero tried to ALLGATHER a rank-zero tensor.",
    )


def check_allgather_dimensions() -> None:
    shape = (4, 10, 2) if _last() else (4, 10)
    _mismatch(
        lambda: hvd.allgather(torch.ones(shape), name="m.ndim"),
        "One rank sent a tensor of rank 2, but another rank sent a tensor of rank 3.",
        "One rank sent a tensor of rank 3, but another rank sent a tensor of rank 2.",
    )


def check_allgather_other_extents() -> None:
    shape = (4, 20) if _last() else (5, 10)
    _mismatch(
        lambda: hvd.allgather(torch.ones(shape), name="m.extent"),
        "One rank sent a tensor with dimension 1 equal to 10, but another rank sent a tensor with "
        "dimension 1 equal to 20.",
        "One rank sent a tensor with dimension 1 equal to 20, but another rank sent a tensor with "
        "dimension 1 equal to 10.",
    )


def check_alltoall_other_extents() -> None:
    n = hvd.size()
    shape = (n, 3) if _last() else (n, 2)
    _mismatch(
        lambda: hvd.alltoall(torch.ones(shape), name="m.a2a"),
        "One rank sent a tensor with dimension 1 equal to 2, but another rank sent a tensor with "
        "dimension 1 equal to 3.",
        "One rank sent a tensor with dimension 1 equal to 3, but another rank sent a tensor with "
        "dimension 1 equal to 2.",
    )


def check_reducescatter_of_a_scalar() -> None:
    _mismatch(
        lambda: hvd.reducescatter(torch.tensor(1.0), name="m.rs"),
        "Process-set rank zero tried to REDUCESCATTER a rank-zero tensor.",
    )


def check_reducescatter_shape() -> None:
    rows = 2 * hvd.size() + (1 if _last() else 0)
    _mismatch(
        lambda: hvd.reducescatter(torch.ones(rows, 2), name="m.rs_shape"),
        "Mismatched REDUCESCATTER tensor shapes:",
    )


def check_broadcast_shape() -> None:
    _mismatch(
        lambda: hvd.broadcast(torch.ones(3 if _last() else 2), 0, name="m.bshape"),
        "Mismatched BROADCAST tensor shapes:",
    )


def check_broadcast_root() -> None:
    root = 1 if _last() else 0
    _mismatch(
        lambda: hvd.broadcast(torch.ones(2), root, name="m.root"),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank "
        "specified root rank 1.",
        "Mismatched BROADCAST root ranks: One rank specified root rank 1, but another rank "
        "specified root rank 0.",
    )


def check_a_root_outside_the_world_is_refused_locally() -> None:
    n = hvd.size()
    text = raised(ValueError, lambda: hvd.broadcast(torch.ones(2), n, name="m.far_root"))
    assert f"received invalid root rank {n} for provided process set" in text
    assert_job_usable()


def check_an_unregistered_process_set_is_refused_locally() -> None:
    foreign = hvd.ProcessSet([0])
    text = raised(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=foreign))
    assert "Process set provided does not exist, or has not been registered." in text
    assert_job_usable()


def check_a_known_name_turning_wrong() -> None:
    for _ in range(3):
        hvd.allreduce(torch.ones(5), name="m.known")
    rows = 6 if _last() else 5
    _mismatch(
        lambda: hvd.allreduce(torch.ones(rows), name="m.known"),
        "Mismatched ALLREDUCE tensor shapes:",
    )
    result = hvd.allreduce(torch.ones(5), name="m.known", op=hvd.Sum)
    assert result.tolist() == [float(hvd.size())] * 5


def check_other_tensors_in_flight_survive() -> None:
    good = [hvd.allreduce_async(torch.ones(4) * i, name=f"m.good{i}") for i in range(5)]
    bad = hvd.allreduce_async(torch.ones(3 if _last() else 2), name="m.bad")
    raised(hvd.HorovodInternalError, lambda: hvd.synchronize(bad))
    for i, handle in enumerate(good):
        assert hvd.synchronize(handle).tolist() == [float(i)] * 4
    assert_job_usable()
