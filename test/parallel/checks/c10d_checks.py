"""torch.distributed on the backend "perseus": every collective, groups, works and futures."""

from __future__ import annotations

import datetime
import functools
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from patterns import ALL, FLOATS, INTEGERS, assert_same, everyone, raised, shared_folder, values
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import perseus.torch.distributed
import perseus.torch.horovod as hvd
from perseus.torch.distributed import backend

SIZES = [(0,), (1,), (17,), (5, 7), (1031,), ()]
# Moved but not reduced by the core, as bytes or pairs of numbers.
OTHERS = [torch.complex64, torch.complex128, torch.float8_e5m2, torch.uint16, torch.uint32]


@contextmanager
def process_group(seconds: float = 60) -> Iterator[None]:
    """The default group, of all ranks."""
    perseus.torch.distributed.register()
    place = f"file://{shared_folder()}/store"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "perseus", init_method=place, rank=hvd.rank(), world_size=hvd.size(), timeout=timeout
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def mine(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return of(hvd.rank(), shape, dtype, salt)


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    if dtype in OTHERS:
        return values(shape, torch.uint8, rank, salt).to(dtype)
    return values(shape, dtype, rank, salt)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.dtype in OTHERS else tensor


def check_all_reduce_of_every_dtype_and_op() -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    with process_group():
        for dtype in ALL:
            for op in ops:
                for shape in SIZES:
                    stack = everyone(shape, dtype)
                    if op == dist.ReduceOp.SUM:
                        expected = stack.sum(0)
                    elif op == dist.ReduceOp.PRODUCT:
                        expected = stack.prod(0)
                    else:
                        expected = stack.amin(0) if op == dist.ReduceOp.MIN else stack.amax(0)
                    if dtype == torch.bool:
                        expected = expected != 0
                    tensor = mine(shape, dtype)
                    dist.all_reduce(tensor, op=op)
                    if dtype in INTEGERS:  # sums and products wrap around
                        expected = expected.to(torch.int64)
                    assert_same(tensor, expected.to(dtype))


def check_all_reduce_of_floats_and_complex_numbers() -> None:
    with process_group():
        for dtype in FLOATS:
            mean = mine((17,), dtype)
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            assert_same(mean, (everyone((17,), dtype).sum(0) / hvd.size()).to(dtype))
            scaled = mine((17,), dtype)
            dist.all_reduce(scaled, op=_distributed_c10d._make_nccl_premul_sum(0.5))
            assert_same(scaled, (everyone((17,), dtype).sum(0) / 2).to(dtype))
        for dtype in (torch.complex64, torch.complex128):
            tensor = mine((9,), dtype) * (1 + 2j)
            dist.all_reduce(tensor)
            total = sum(of(rank, (9,), dtype) * (1 + 2j) for rank in range(hvd.size()))
            assert_same(tensor, total)
            with pytest.raises(ValueError, match="complex"):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def check_bits_are_reduced() -> None:
    pairs = [
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ]
    with process_group():
        for dtype in [*INTEGERS, torch.bool]:
            for op, combine in pairs:
                expected = of(0, (23,), dtype)
                for rank in range(1, hvd.size()):
                    expected = combine(expected, of(rank, (23,), dtype))
                tensor = mine((23,), dtype)
                dist.all_reduce(tensor, op=op)
                assert_same(tensor, expected)
                parts = torch.cat([mine((3,), dtype, salt) for salt in range(hvd.size())])
                part = torch.empty(3, dtype=dtype)
                dist.reduce_scatter_tensor(part, parts, op=op)
                expected = of(0, (3,), dtype, hvd.rank())
                for rank in range(1, hvd.size()):
                    expected = combine(expected, of(rank, (3,), dtype, hvd.rank()))
                assert_same(part, expected)
        message = raised(ValueError, lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BOR))
        assert "BOR is defined for integers" in message


_SHAPE = (4, 3, 2, 5)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with something else between them in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _laid_out(tensor: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """The same values, in memory as another rank's are not; on no rank as values() are."""
    layouts = [_channels_last, _with_gaps, lambda t: t.mT.contiguous().mT, torch.Tensor.clone]
    return layouts[(hvd.rank() + salt) % len(layouts)](tensor)


def _sum(dtype: torch.dtype) -> torch.Tensor:
    return everyone(_SHAPE, dtype).sum(0).to(dtype)


def check_reductions_of_any_layout() -> None:
    ones = torch.full(_SHAPE, 1 << hvd.rank())
    everybody = torch.full(_SHAPE, (1 << hvd.size()) - 1)
    size, rank = hvd.size(), hvd.rank()
    with process_group():
        for salt, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
            tensor = _laid_out(mine(_SHAPE, dtype), salt)
            strides = tensor.stride()
            dist.all_reduce(tensor)
            assert_same(tensor, _sum(dtype))
            assert tensor.stride() == strides
            tensors = [_laid_out(mine(_SHAPE, dtype), salt + i) for i in range(3)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                dist.all_reduce_coalesced(tensors)
            for tensor in tensors:
                assert_same(tensor, _sum(dtype))
            for root in range(size):
                tensor = _laid_out(mine(_SHAPE, dtype), salt)
                dist.reduce(tensor, root)
                assert_same(tensor, _sum(dtype) if rank == root else mine(_SHAPE, dtype))
            given = [_laid_out(mine(_SHAPE, dtype), salt + other) for other in range(size)]
            part = _laid_out(torch.zeros(_SHAPE, dtype=dtype), salt + 1)
            dist.reduce_scatter(part, given)
            assert_same(part, _sum(dtype))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                dist.reduce_scatter_tensor(part.zero_(), _with_gaps(torch.cat(given)))
            assert_same(part, _sum(dtype))
        bits = _laid_out(ones)
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert_same(bits, everybody)
        pairs = _laid_out(mine(_SHAPE, torch.complex64) * (1 + 2j), 1)
        dist.all_reduce(pairs)
        assert_same(pairs, sum(of(r, _SHAPE, torch.complex64) * (1 + 2j) for r in range(size)))


def check_moves_of_any_layout() -> None:
    size, rank = hvd.size(), hvd.rank()
    with process_group():
        for salt, dtype in enumerate((torch.float32, torch.complex64, torch.uint16)):
            expected = [of(other, _SHAPE, dtype) for other in range(size)]
            own = _laid_out(mine(_SHAPE, dtype), salt)
            empty = torch.zeros(_SHAPE, dtype=dtype)

            def outputs(empty: torch.Tensor = empty, salt: int = salt) -> list[torch.Tensor]:
                return [_laid_out(empty, salt + other) for other in range(size)]

            parts = outputs()
            dist.all_gather(parts, own)
            for root in range(size):
                tensor = own.clone()  # with its strides
                dist.broadcast(tensor, root)
                assert_same(bits(tensor), bits(expected[root]))
                gathered = outputs() if rank == root else None
                dist.gather(own, gathered, root)
                assert all(map(torch.equal, gathered or [], expected))
                tensor = outputs()[0]
                dist.scatter(tensor, parts if rank == root else None, root)
                assert_same(bits(tensor), bits(expected[rank]))
            exchanged = outputs()
            dist.all_to_all(exchanged, [own] * size)
            joined = _with_gaps(torch.zeros(_SHAPE[0] * size, *_SHAPE[1:], dtype=dtype))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                dist.all_gather_into_tensor(joined, own)
            rows = _with_gaps(torch.zeros(size, 5, dtype=dtype))
            dist.all_to_all_single(rows, _with_gaps(mine((size, 5), dtype)))
            for other, row in enumerate(rows):
                assert_same(bits(row), bits(of(other, (size, 5), dtype)[rank]))
            following, before = (rank + 1) % size, (rank - 1) % size
            received = outputs()[0]
            sent = dist.isend(own, following)
            dist.recv(received, before)
            sent.wait()
            assert_same(bits(received), bits(expected[before]))
            for found in (parts, exchanged, joined.chunk(size)):
                for part, values in zip(found, expected, strict=True):
                    assert_same(bits(part), bits(values))


def check_works_of_any_layout_end_with_the_tensor_itself() -> None:
    """Also one that autograd watches, and one of inference mode, closed to other threads."""
    total = _sum(torch.float32)
    with process_group():
        with torch.inference_mode():
            inferred = _with_gaps(mine(_SHAPE, torch.float32))
        parameter = torch.nn.Parameter(_channels_last(mine(_SHAPE, torch.float32)))
        for tensor in (inferred, parameter):
            (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
            assert result.data_ptr() == tensor.data_ptr()
            assert_same(tensor.detach(), total)
        work = dist.broadcast(parameter.data, 1, async_op=True)
        assert work.wait() and work.result()[0].data_ptr() == parameter.data_ptr()
        shape = (3, 2) if hvd.rank() == 0 else (4, 2)
        tensor = _with_gaps(torch.ones(shape))
        for asynchronous in (False, True):
            with pytest.raises(dist.DistBackendError, match="Mismatched"):
                work = dist.all_reduce(tensor, async_op=asynchronous)
                work.wait()
        assert torch.equal(tensor, torch.ones(shape))


def check_reduce_overwrites_the_root_alone() -> None:
    with process_group():
        for root in range(hvd.size()):
            tensor = mine((17,), torch.float32, root)
            dist.reduce(tensor, dst=root)
            total = everyone((17,), torch.float32, root).sum(0).to(torch.float32)
            own = mine((17,), torch.float32, root)
            assert_same(tensor, total if hvd.rank() == root else own)


def check_gathers_of_every_dtype() -> None:
    size = hvd.size()
    with process_group():
        for dtype in [*ALL, *OTHERS]:
            for shape in SIZES:
                parts = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                dist.all_gather(parts, mine(shape, dtype))
                for rank, part in enumerate(parts):
                    assert_same(bits(part), bits(of(rank, shape, dtype)))
            joined = torch.empty(size * 5, 2, dtype=dtype)
            dist.all_gather_into_tensor(joined, mine((5, 2), dtype))
            expected = torch.cat([bits(of(rank, (5, 2), dtype)) for rank in range(size)])
            assert_same(bits(joined), expected)
            root = size - 1
            parts = [torch.empty(4, dtype=dtype) for _ in range(size)]
            dist.gather(mine((4,), dtype), parts if hvd.rank() == root else None, dst=root)
            for rank, part in enumerate(parts if hvd.rank() == root else []):
                assert_same(bits(part), bits(of(rank, (4,), dtype)))


def check_scatters_and_broadcasts_from_every_root() -> None:
    size = hvd.size()
    with process_group():
        for root in range(size):
            for dtype in [*ALL, *OTHERS]:
                given = [of(root, (6,), dtype, salt) for salt in range(size)]
                part = torch.empty(6, dtype=dtype)
                dist.scatter(part, given if hvd.rank() == root else None, src=root)
                assert_same(bits(part), bits(of(root, (6,), dtype, hvd.rank())))
                tensor = mine((3, 5), dtype)
                dist.broadcast(tensor, src=root)
                assert_same(bits(tensor), bits(of(root, (3, 5), dtype)))


def check_reduce_scatters() -> None:
    size, rank = hvd.size(), hvd.rank()
    with process_group():
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            total = sum(of(other, (7,), dtype, rank) for other in range(size))
            part = torch.empty(7, dtype=dtype)
            dist.reduce_scatter(part, [mine((7,), dtype, salt) for salt in range(size)])
            assert_same(part, total)
            part = torch.empty(7, dtype=dtype)
            joined = torch.cat([mine((7,), dtype, salt) for salt in range(size)])
            dist.reduce_scatter_tensor(part, joined)
            assert_same(part, total)
        wrong = raised(ValueError, lambda: dist.reduce_scatter_tensor(part, joined[1:]))
        assert "reduce_scatter" in wrong


def check_all_to_all_with_and_without_splits() -> None:
    size, rank = hvd.size(), hvd.rank()
    with process_group():
        for dtype in (torch.float32, torch.uint8, torch.complex64):
            given = [of(rank, (other + 1, 2), dtype, other) for other in range(size)]
            received = [torch.empty(rank + 1, 2, dtype=dtype) for _ in range(size)]
            dist.all_to_all(received, given)
            for other in range(size):
                assert_same(received[other], of(other, (rank + 1, 2), dtype, rank))
            output = torch.empty((rank + 1) * size, 2, dtype=dtype)
            splits = [other + 1 for other in range(size)]
            dist.all_to_all_single(output, torch.cat(given), [rank + 1] * size, splits)
            assert_same(output, torch.cat(received))
            even = torch.empty(2 * size, dtype=dtype)
            dist.all_to_all_single(even, mine((2 * size,), dtype))
            wanted = [
                of(other, (2 * size,), dtype)[2 * rank : 2 * rank + 2] for other in range(size)
            ]
            assert_same(even, torch.cat(wanted))
        text = raised(ValueError, lambda: dist.all_to_all_single(even, even, [1], [1]))
        assert "split sizes" in text


def check_parts_of_wrong_sizes_are_errors() -> None:
    """Also where their sum is what the output has room for."""
    size, rank = hvd.size(), hvd.rank()
    n = size + 1
    given = torch.arange(n, dtype=torch.float32) + 10 * rank
    # Rank 1 sends two elements to rank 0, which expects them from itself.
    to_each = [2] + [1] * (size - 1) if rank == 1 else [1] * size
    from_each = [2] + [1] * (size - 1) if rank == 0 else [1] * size
    sent = given[: sum(to_each)]

    def single() -> None:
        dist.all_to_all_single(torch.empty(sum(from_each)), sent, from_each, to_each)

    def lists() -> None:
        dist.all_to_all([torch.empty(k) for k in from_each], list(sent.split(to_each)))

    with process_group():
        for call in (single, lists):
            if rank == 0:
                message = raised(dist.DistBackendError, call)
                assert "all_to_all: 4 bytes came from rank 0, but the output has 8" in message
            else:
                call()
        uneven = [torch.empty(n + (k == 0) - (k == 1)) for k in range(size)]
        message = raised(ValueError, lambda: dist.all_gather(uneven, given))
        assert f"all_gather: expected {size} tensors of {n} elements" in message
        if rank == 0:
            message = raised(ValueError, lambda: dist.gather(given, uneven))
            assert f"gather: expected {size} tensors of {n} elements" in message
            message = raised(ValueError, lambda: dist.scatter(given, uneven))
            assert f"scatter: expected {size} tensors of {n} elements" in message
        own = torch.full((rank + 1,), float(rank))
        for dtype, op in ((torch.float32, None), (torch.int32, dist.ReduceOp.BOR)):
            tensor = own.to(dtype)
            outputs = [torch.empty_like(tensor) for _ in range(size)]
            call = functools.partial(dist.all_gather, outputs, tensor)
            if op is not None:
                call = functools.partial(dist.all_reduce, tensor, op=op)
            assert "Mismatched" in raised(dist.DistBackendError, call)
        root = size - 1
        outputs = [torch.empty_like(own) for _ in range(size)] if rank == root else None
        if rank == root:
            message = raised(dist.DistBackendError, lambda: dist.gather(own, outputs, dst=root))
            assert f"gather: 4 bytes came from rank 0, but the output has {4 * size}" in message
        else:
            dist.gather(own, outputs, dst=root)


def check_objects_and_barriers() -> None:
    with process_group():
        found = [None] * hvd.size()
        dist.all_gather_object(found, {"rank": hvd.rank(), "text": "x" * hvd.rank()})
        assert found == [{"rank": rank, "text": "x" * rank} for rank in range(hvd.size())]
        given = [hvd.rank(), "root"] if hvd.rank() == 0 else [None, None]
        dist.broadcast_object_list(given, src=0)
        assert given == [0, "root"]
        dist.barrier()
        before = dist.group.WORLD._get_sequence_number_for_group()
        dist.barrier()
        assert dist.group.WORLD._get_sequence_number_for_group() == before + 1


def check_sends_and_receives_of_every_dtype() -> None:
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    with process_group():
        for dtype in [*ALL, *OTHERS]:
            for tag, shape in enumerate(SIZES):
                received = torch.empty(shape, dtype=dtype)
                works = [
                    dist.isend(mine(shape, dtype), after, tag=tag),
                    dist.irecv(received, before, tag=tag),
                ]
                for work in works:
                    assert work.wait()
                assert_same(bits(received), bits(of(before, shape, dtype)))
        received = torch.empty(70_000)
        if rank == 0:
            dist.send(mine((70_000,), torch.float32), dst=size - 1)
        elif rank == size - 1:
            assert dist.recv(received, src=0) == 0
            assert_same(received, of(0, (70_000,), torch.float32))


def check_receives_from_any_rank_and_tags_in_any_order() -> None:
    rank, size = hvd.rank(), hvd.size()
    with process_group():
        group = dist.new_group(list(reversed(range(size))))
        if rank != 0:
            works = [dist.isend(mine((1000,), torch.float32, tag), 0, group, tag) for tag in (1, 2)]
            for work in works:
                work.wait()
        else:
            for tag in (2, 1):
                sources = []
                for _ in range(1, size):
                    received = torch.empty(1000)
                    sources.append(dist.recv(received, group=group, tag=tag))
                    assert_same(received, of(sources[-1], (1000,), torch.float32, tag))
                assert sorted(sources) == list(range(1, size))


def check_batches_of_sends_and_receives() -> None:
    rank, size = hvd.rank(), hvd.size()
    with process_group():
        received = [torch.empty(5000) for _ in range(size)]
        sends = [
            dist.P2POp(dist.isend, mine((5000,), torch.float32, other), other)
            for other in range(size)
            if other != rank
        ]
        receives = [
            dist.P2POp(dist.irecv, received[other], other) for other in range(size) if other != rank
        ]
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        for other in range(size):
            if other != rank:
                assert_same(received[other], of(other, (5000,), torch.float32, rank))
        if rank == 0:
            dist.send_object_list([{"from": rank}], 1)
        if rank == 1:
            found = [None]
            dist.recv_object_list(found, 0)
            assert found == [{"from": 0}]


def check_sparse_tensors() -> None:
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        own = torch.sparse_coo_tensor([[0, rank]], [1.0, rank + 2.0], (size + 1,))
        dist.all_reduce(own)
        expected = torch.zeros(size + 1)
        for other in range(size):
            expected[0] += 1
            expected[other] += other + 2
        assert own.is_sparse
        assert_same(own.to_dense(), expected)


def check_groups_do_not_wait_for_each_other() -> None:
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        everybody = dist.new_group(list(range(size)))
        pairs = [dist.new_group([0, other]) for other in range(1, size)]
        work = None
        if rank == 0:  # the other group's operation comes first here, and last elsewhere
            tensor = mine((9,), torch.float32)
            work = dist.all_reduce(tensor, group=everybody, async_op=True)
        for other, pair in enumerate(pairs, start=1):
            if rank in {0, other}:
                joint = torch.full((3,), rank + 1.0)
                dist.all_reduce(joint, group=pair)
                assert_same(joint, torch.full((3,), other + 2.0))
        if rank != 0:
            tensor = mine((9,), torch.float32)
            work = dist.all_reduce(tensor, group=everybody, async_op=True)
        work.wait()
        assert_same(tensor, everyone((9,), torch.float32).sum(0).to(torch.float32))


def check_a_work_tells_its_state() -> None:
    with process_group():
        tensor = mine((9,), torch.float32)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.get_future().wait()[0] is tensor or torch.equal(work.result()[0], tensor)
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert work.wait()
        shape = (3,) if hvd.rank() == 0 else (4,)
        failed = dist.all_reduce(torch.ones(shape), async_op=True)
        text = raised(dist.DistBackendError, failed.wait)
        assert "Mismatched" in text
        assert failed.is_completed() and not failed.is_success()
        assert isinstance(failed.exception(), dist.DistBackendError)
        dist.all_reduce(tensor)  # the group goes on
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_reduce(torch.ones(3).expand(4, 3))


def check_whoever_watches_operations_sees_collectives() -> None:
    if not hasattr(_distributed_c10d.Backend, "supports_reconfigure"):
        pytest.skip("torch before 2.14 calls a backend in Python past its dispatcher")

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with process_group():
        calls = {
            "allreduce": dist.all_reduce,
            "broadcast": lambda tensor: dist.broadcast(tensor, 0),
            "reduce": lambda tensor: dist.reduce(tensor, 0),
        }
        for name, call in calls.items():
            plain, watched, profiled = (mine((9,), torch.float32) for _ in range(3))
            call(plain)
            with Watch() as watch:
                call(watched)
            assert any(f"c10d.{name}_" in seen for seen in watch.seen), watch.seen
            with torch.profiler.profile() as profile:
                call(profiled)
            assert any(f"c10d::{name}_" == event.key for event in profile.key_averages())
            assert_same(watched, plain)
            assert_same(profiled, plain)
        hooked: list[object] = []
        dist.group.WORLD.register_pre_hook(1, hooked.append)
        dist.all_reduce(mine((9,), torch.float32))
        assert len(hooked) == 1


def check_a_wait_ends_in_time_and_may_be_repeated() -> None:
    with process_group():
        tensor = mine((9,), torch.float32)
        if hvd.rank() == 0:
            late = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(dist.DistBackendError, match=r"did not end within 0.2 s \(timeout="):
                late.wait(datetime.timedelta(seconds=0.2))
            assert not late.is_completed() and late.exception() is None
            hvd.barrier()
        else:
            hvd.barrier()
            late = dist.all_reduce(tensor, async_op=True)
        assert late.wait(datetime.timedelta(seconds=60))
        assert_same(tensor, everyone((9,), torch.float32).sum(0).to(torch.float32))


def check_what_a_living_rank_never_answers_ends_with_the_timeout() -> None:
    rank, last = hvd.rank(), hvd.size() - 1
    calls = {
        f"rank {last} has not started a receive from rank 0 with tag 3": (
            lambda group: dist.isend(torch.ones(5000), last, group, 3)
        ),
        f"rank {last} has not started a send to rank 0 with tag 3": (
            lambda group: dist.irecv(torch.ones(2), last, group, 3)
        ),
        f"{last} has started a send to rank 0 with tag 3": (
            lambda group: dist.irecv(torch.ones(2), None, group, 3)
        ),
        f"Missing ranks:\nrank {last}: [": (
            lambda group: dist.all_reduce(torch.ones(2), group=group, async_op=True)
        ),
    }
    with process_group():
        for expected, call in calls.items():
            group = dist.new_group(timeout=datetime.timedelta(seconds=2))
            if rank == 0 or (rank != last and "Missing" in expected):
                text = raised(dist.DistBackendError, call(group).wait)
                assert expected in text, text
                assert "timeout= of init_process_group" in text, text
                text = raised(dist.DistBackendError, call(group).wait)
                assert expected in text, text
                again = functools.partial(dist.all_reduce, torch.ones(2), group=group)
                text = raised(dist.DistBackendError, again)
                assert expected in text, text
            dist.barrier()


def check_errors_speak_of_process_groups() -> None:
    with process_group():
        group = dist.new_group()
        received = torch.ones(2)
        if hvd.rank() == 0:
            dist.barrier()
            group.abort()
        else:
            work = dist.irecv(received, 0, group)
            dist.barrier()
            text = raised(dist.DistBackendError, work.wait)
            assert "rank 0 called destroy_process_group() or ended" in text, text
            assert "Horovod" not in text and "init_process_group() or new_group()" in text, text


def check_a_group_tells_why_it_has_ended() -> None:
    def error_of(group: dist.ProcessGroup) -> object:
        backend = group if hasattr(group, "world") else group._get_backend(torch.device("cpu"))
        return backend.get_error()

    kinds = _distributed_c10d.ErrorType
    seconds = datetime.timedelta(seconds=2)
    with process_group():
        works, aborted, late = dist.new_group(), dist.new_group(), dist.new_group(timeout=seconds)
        assert error_of(works) == error_of(aborted) == error_of(late) == kinds.SUCCESS
        dist.barrier()
        if hvd.rank() == 0:
            aborted.abort()
            raised(dist.DistBackendError, dist.irecv(torch.ones(2), 1, late).wait)
        dist.barrier()
        for group in (aborted, late):
            raised(dist.DistBackendError, functools.partial(dist.barrier, group))
        assert error_of(works) == kinds.SUCCESS
        assert error_of(aborted) == (kinds.REMOTE_ERROR if hvd.rank() else kinds.COMM_ERROR)
        assert error_of(late) == (kinds.REMOTE_ERROR if hvd.rank() else kinds.TIMEOUT)


def check_the_timeout_of_a_group_can_be_changed() -> None:
    with process_group():
        group = dist.new_group()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if hasattr(group, "set_timeout"):
                group.set_timeout(datetime.timedelta(seconds=2))
        if hvd.rank() == 0:
            begun = time.monotonic()
            text = raised(dist.DistBackendError, dist.irecv(torch.ones(2), 1, group).wait)
            assert "within 2 s" in text, text
            assert time.monotonic() - begun < 20
        dist.barrier()


def check_a_group_can_shrink() -> None:
    if not hasattr(_distributed_c10d.Backend, "supports_reconfigure"):
        pytest.skip("torch before 2.14 shrinks its own backends alone")
    with process_group():
        last = hvd.size() - 1
        group = dist.new_group()
        if hvd.rank() != last:
            shrunk = dist.shrink_group([last], group)
            assert shrunk.size() == last
            tensor = mine((9,), torch.int64)
            dist.all_reduce(tensor, group=shrunk)
            assert_same(tensor, sum(of(rank, (9,), torch.int64) for rank in range(last)))
        dist.barrier()


def check_callbacks_run_in_the_order_of_submission() -> None:
    with process_group():
        order: list[int] = []
        totals = []
        futures = []
        for number in range(20):
            tensor = torch.full((1000 * (20 - number),), float(hvd.rank() + number))
            future = dist.all_reduce(tensor, async_op=True).get_future()

            def then(done: torch.futures.Future, number: int = number) -> torch.Tensor:
                order.append(number)
                inner = done.value()[0][:1].clone()
                return dist.all_reduce(inner, async_op=True).get_future().wait()[0]

            futures.append(future.then(then))
            own = torch.ones(3)
            dist.all_reduce(own)  # of this thread, between those of the callbacks
            assert_same(own, torch.full((3,), float(hvd.size())))
        for number, future in enumerate(futures):
            once = sum(range(hvd.size())) + number * hvd.size()
            totals.append(future.wait().item() == once * hvd.size())
        assert order == list(range(20))
        assert all(totals)


def check_futures_of_groups_do_not_wait_for_each_other() -> None:
    with process_group(15):
        limit = datetime.timedelta(seconds=15)
        first, second = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
        x, y = torch.ones(3), torch.ones(3)
        if hvd.rank() == 0:
            late = dist.all_reduce(x, group=first, async_op=True).get_future()
            soon = dist.all_reduce(y, group=second, async_op=True).get_future()
            soon.then(lambda done: done.value()[0].neg_()).wait()
        else:
            dist.all_reduce(y, group=second)
        dist.barrier()
        if hvd.rank() == 0:
            late.wait()
        else:
            dist.all_reduce(x, group=first)
        assert_same(x, torch.full((3,), float(hvd.size())))
        assert_same(y, torch.full((3,), float(-hvd.size() if hvd.rank() == 0 else hvd.size())))


def check_futures_of_receives_keep_no_others_waiting() -> None:
    """Nor do those of collectives keep them waiting, which may end only after them."""
    with process_group(15):
        rank, size = hvd.rank(), hvd.size()
        received, x, y = torch.zeros(3), torch.ones(3), torch.ones(3)
        if rank == 0:
            future = dist.irecv(received, src=1).get_future()
            dist.all_reduce(x, async_op=True).get_future().then(lambda _: None).wait()
            late = dist.all_reduce(y, async_op=True).get_future()
            dist.send(x, 1)
            future.wait()
            assert future.then(lambda done: done.value()[0].sum()).wait() == 3 * size
            dist.send(x, 1)
            late.wait()
            names = [each.name for each in threading.enumerate()]
            assert names.count("perseus futures") <= 2, "those of receives end with them"
        else:
            dist.all_reduce(x)
            if rank == 1:
                dist.recv(received, src=0)
                dist.isend(received, 0).get_future().wait()
                dist.recv(received, src=0)
            dist.all_reduce(y)
        assert_same(y, torch.full((3,), float(size)))
        if rank < 2:
            assert_same(received, x)


def check_callbacks_start_collectives_of_another_group() -> None:
    """While that group's own callbacks start some."""
    with process_group():
        other = dist.new_group()

        def of(group: dist.ProcessGroup, number: int) -> torch.futures.Future:
            def then(_: torch.futures.Future) -> float:
                own = torch.full((), float(number))
                dist.all_reduce(own, group=other)
                return own.item()

            given = torch.ones(1000)
            return dist.all_reduce(given, group=group, async_op=True).get_future().then(then)

        futures = [of(group, number) for number in range(20) for group in (None, other)]
        for number, future in enumerate(futures):
            assert future.wait() == number // 2 * hvd.size()


def check_parts_are_gathered_into_the_tensor_that_they_lie_in() -> None:
    rank, size = hvd.rank(), hvd.size()
    with process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for n in (1, 300, 100_001):
            expected = torch.cat([of(other, (n,), torch.float32, n) for other in range(size)])
            # Its own part, as of sharded parameters, or that of another rank.
            for place in range(size):
                whole = torch.zeros(n * size)
                part = whole[place * n : (place + 1) * n].copy_(mine((n,), torch.float32, n))
                if rank in (0, place):
                    dist.all_gather_into_tensor(whole, part)
                else:
                    dist.all_gather_into_tensor(whole, part.clone())
                assert_same(whole, expected)
            across = torch.zeros((n + 1) * size)[1 : n * size + 1]
            dist.all_gather_into_tensor(across, mine((n,), torch.float32, n))
            assert_same(across, expected)


def check_a_tensor_ends_with_its_work() -> None:
    with process_group():
        tensor = torch.ones(1000)
        known = weakref.ref(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del tensor, work
        gc.collect()
        assert known() is None


def check_names_of_collectives_in_callbacks_are_forgotten() -> None:
    """Each is used once; every round of the negotiation would send a bit for it from then on."""

    def sent() -> int:
        before = world.context.stats()
        for _ in range(20):
            dist.all_reduce(torch.ones(3))
        after = world.context.stats()
        return sum(after[key] - before[key] for key in ("shm_bytes_sent", "tcp_bytes_sent"))

    def then(done: torch.futures.Future) -> None:
        dist.all_reduce(done.value()[0].clone())

    with process_group():
        world = DistributedDataParallel(torch.nn.Linear(1, 1))._perseus._group.world
        dist.barrier()
        at_first = sent()
        for _ in range(10):
            works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(50)]
            for future in [work.get_future().then(then) for work in works]:
                future.wait()
        dist.barrier()
        assert sent() < 1.1 * at_first  # names that are made from a number have more digits


def check_coalesced_forms() -> None:
    with process_group():
        tensors = [mine((n,), torch.float32, n) for n in (1, 5, 300)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        for tensor, n in zip(tensors, (1, 5, 300), strict=True):
            assert_same(tensor, everyone((n,), torch.float32, n).sum(0).to(torch.float32))


def check_a_group_can_be_made_again() -> None:
    for turn in range(3):
        with process_group():
            tensor = mine((5,), torch.int32, turn)
            dist.all_reduce(tensor)
            assert_same(tensor, everyone((5,), torch.int32, turn).sum(0).to(torch.int32))


def check_split_groups() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        pytest.skip("torch before 2.15 splits groups of an accelerator alone")
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        parts = [list(range(1, size)), [0]]
        part = dist.split_group(split_ranks=parts)
        tensor = mine((5,), torch.int64)
        dist.all_reduce(tensor, group=part)
        total = sum(of(other, (5,), torch.int64) for other in parts[rank == 0])
        assert_same(tensor, total)


def check_a_barrier_of_a_group_made_again_is_not_met_by_the_last_ones() -> None:
    """Though both have the same store, with what the first one has left there."""
    store = dist.PrefixStore("again", dist.FileStore(f"{shared_folder()}/store", hvd.size()))
    options = _distributed_c10d.BarrierOptions()
    for _ in range(2):
        group = backend._create(store, hvd.rank(), hvd.size(), datetime.timedelta(seconds=60))
        options.timeout = datetime.timedelta(seconds=1)
        barrier = functools.partial(group.monitored_barrier, options)
        if hvd.rank() == 0:
            assert "rank" in raised(RuntimeError, barrier)
        group.barrier().wait()
        if hvd.rank() != 0:  # too late
            assert "did not come within 1 s" in raised(RuntimeError, barrier)
        options.timeout = datetime.timedelta(seconds=30)
        group.monitored_barrier(options)
        group.shutdown()


def check_monitored_barriers_name_a_missing_rank_0() -> None:
    with process_group():
        limit = datetime.timedelta(seconds=0.5)
        if hvd.rank() != 0:
            text = raised(RuntimeError, functools.partial(dist.monitored_barrier, None, limit))
            assert "[torch] monitored_barrier: rank 0 did not come within 0.5 s" in text
        dist.barrier()


def check_monitored_barriers_leave_one_key_behind() -> None:
    keys = []
    with process_group():
        store = backend._group_of(dist.group.WORLD, "cpu")._store
        for _ in range(2):
            for _ in range(5):
                dist.monitored_barrier()
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
    assert keys[0] == keys[1]


def check_monitored_barriers_name_all_missing_ranks() -> None:
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        dist.monitored_barrier()
        missing = [1] if size == 2 else [1, size - 1]
        named = f"rank{'s' if size > 2 else ''} {', '.join(map(str, missing))} did not come within"
        limit = datetime.timedelta(seconds=1)
        for group in (None, dist.new_group(timeout=datetime.timedelta(seconds=30))):
            barrier = functools.partial(dist.monitored_barrier, group, limit)
            if rank not in missing:
                assert f"monitored_barrier: {named} 1 s" in raised(RuntimeError, barrier)
            dist.barrier()
            if rank in missing:  # too late
                assert f"monitored_barrier: {named} 1 s" in raised(RuntimeError, barrier)
            dist.monitored_barrier(group, wait_all_ranks=True, timeout=limit)
        alone = dist.new_group([0])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dist.monitored_barrier(alone)
        assert ("does not belong" in " ".join(str(one.message) for one in said)) == (rank != 0)
        own = dist.new_group(backend="gloo")
        dist.monitored_barrier(own, limit)
        if rank == 0:
            raised(RuntimeError, functools.partial(dist.monitored_barrier, own, limit))
        dist.barrier()
