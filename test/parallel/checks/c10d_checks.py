"""torch.distributed on the backend "perseus": every collective, and messages."""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patterns import ALL, FLOATS, INTEGERS, assert_same, everyone, raised
from process_groups import OTHERS, mine, of, process_group
from torch._C import _distributed_c10d
from torch.distributed import _functional_collectives as funcol

import perseus.torch.horovod as hvd
from perseus.torch.distributed import backend

SIZES = [(0,), (1,), (17,), (5, 7), (1031,), ()]


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


def check_reduce_scatters_of_parts_that_differ_in_size() -> None:
    size, rank = hvd.size(), hvd.rank()
    shapes = [(other, 3) for other in range(size)]  # rank 0's is empty
    with process_group():
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            part = torch.full(shapes[rank], 1, dtype=dtype)
            given = [mine(shape, dtype, salt) for salt, shape in enumerate(shapes)]
            dist.reduce_scatter(part, given)
            assert_same(part, sum(of(other, shapes[rank], dtype, rank) for other in range(size)))
        ones = [torch.full(shape, 1 << rank) for shape in shapes]
        turned = torch.empty(3, rank, dtype=torch.int64).t()
        work = dist.reduce_scatter(turned, ones, dist.ReduceOp.BOR, async_op=True)
        assert work.get_future().wait()[0] is turned or work.result()[0] is turned
        assert_same(turned, torch.full(shapes[rank], (1 << size) - 1))
        part = torch.full(shapes[rank], -1.0)
        dist.reduce_scatter(part, [float(size) * one for one in ones], dist.ReduceOp.AVG)
        assert_same(part, torch.full(shapes[rank], (1 << size) - 1.0))
        wrong = raised(ValueError, lambda: dist.reduce_scatter(ones[0].new_empty(50), ones))
        assert f"50 elements in that of rank {rank}" in wrong


def check_roots_that_do_not_exist() -> None:
    tensor = torch.ones(2)
    with process_group():
        group = dist.group.WORLD
        calls: list[tuple[Any, Callable[[Any], object]]] = [
            (dist.ReduceOptions, lambda options: group.reduce([tensor], options)),
            (dist.GatherOptions, lambda options: group.gather([], [tensor], options)),
            (dist.ScatterOptions, lambda options: group.scatter([tensor], [], options)),
            (dist.BroadcastOptions, lambda options: group.broadcast([tensor], options)),
        ]
        for kind, call in calls:
            for root in (-1, hvd.size()):
                options = kind()
                options.rootRank = root
                wrong = raised(ValueError, functools.partial(call, options))
                assert f"invalid root rank {root}" in wrong, wrong
        dist.barrier()


def check_calls_without_options() -> None:
    size, rank = hvd.size(), hvd.rank()
    with process_group():
        group = dist.group.WORLD
        given = torch.cat([mine((3,), torch.float32, salt) for salt in range(size)])
        total = sum(of(other, (3,), torch.float32, rank) for other in range(size))
        parts = [torch.empty(3) for _ in range(3)]
        group._reduce_scatter_base(parts[0], given).wait()
        group.reduce_scatter_tensor_coalesced(parts[1:], [given, given]).wait()
        for part in parts:
            assert_same(part, total)


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


def check_coalesced_forms() -> None:
    with process_group():
        tensors = [mine((n,), torch.float32, n) for n in (1, 5, 300)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        for tensor, n in zip(tensors, (1, 5, 300), strict=True):
            assert_same(tensor, everyone((n,), torch.float32, n).sum(0).to(torch.float32))


def check_results_of_functional_collectives_take_part() -> None:
    with process_group():
        size, total = hvd.size(), everyone((9,), torch.int64).sum(0).to(torch.int64)

        def result() -> torch.Tensor:
            return funcol.all_reduce(mine((9,), torch.int64), "sum", dist.group.WORLD)

        reduced = result()
        dist.all_reduce(reduced)
        assert_same(reduced + 0, total * size)
        cast = result()
        dist.broadcast(cast, 0)
        assert_same(cast + 0, total)
        gathered = torch.empty(9 * size, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, result())
        assert_same(gathered, total.repeat(size))
        exchanged = [torch.empty(9, dtype=torch.int64) for _ in range(size)]
        dist.all_to_all(exchanged, [result() for _ in range(size)])
        for each in exchanged:
            assert_same(each, total)
        if not backend.IS_BACKEND:  # where c10d's dispatcher asks DTensor
            from torch.distributed.tensor import DTensor, Shard, init_device_mesh

            mesh = init_device_mesh("cpu", (size,))
            sharded = DTensor.from_local(mine((9,), torch.int64), mesh, [Shard(0)])
            text = raised(ValueError, lambda: dist.all_reduce(sharded))
            assert "not a DTensor: pass .to_local()" in text


def check_forms_without_lists_and_options() -> None:
    def total(op: str) -> torch.Tensor:
        return getattr(everyone((4,), torch.float32), op)(0).to(torch.float32)

    with process_group():
        group, rank, size = dist.group.WORLD, hvd.rank(), hvd.size()
        own = mine((4,), torch.float32)
        last = size - 1
        limit = datetime.timedelta(seconds=60)

        def changed(start: Callable[[torch.Tensor], Any]) -> torch.Tensor:
            tensor = own.clone()
            start(tensor).wait()
            return tensor

        for start, op in (
            (group.allreduce, "sum"),
            (lambda t: group.allreduce([t]), "sum"),
            (lambda t: group.allreduce(t, dist.ReduceOp.MAX), "amax"),
            (lambda t: group.allreduce([t], op=dist.ReduceOp.MAX, timeout=limit), "amax"),
            (lambda t: group.allreduce(tensors=[t], opts=dist.AllreduceOptions()), "sum"),
            (lambda t: group.allreduce_coalesced([t]), "sum"),
        ):
            assert_same(changed(start), total(op))
        for start, op, root in (
            (lambda t: group.reduce([t]), "sum", 0),
            (lambda t: group.reduce(t, last), "sum", last),
            (lambda t: group.reduce(t, root=last, op=dist.ReduceOp.MAX), "amax", last),
        ):
            assert_same(changed(start), total(op) if rank == root else own)
        assert_same(changed(lambda t: group.broadcast([t])), of(0, (4,), torch.float32))
        assert_same(changed(lambda t: group.broadcast(t, last)), of(last, (4,), torch.float32))

        def parts() -> list[torch.Tensor]:
            return [torch.zeros(4) for _ in range(size)]

        expected = [of(each, (4,), torch.float32) for each in range(size)]
        everywhere, at_last = parts(), parts()
        group.allgather(everywhere, own).wait()
        group.gather(at_last if rank == last else [], own, last).wait()
        for each in range(size):
            assert_same(everywhere[each], expected[each])
            assert_same(at_last[each], expected[each] if rank == last else torch.zeros(4))
        assert_same(
            changed(lambda t: group.scatter(t, expected if rank == last else [], last)), own
        )
        assert_same(changed(lambda t: group.reduce_scatter(t, [own] * size)), total("sum"))
        group.barrier(timeout=limit).wait()
        group.barrier().wait()
        raised(TypeError, lambda: group.allreduce_coalesced([own], dist.ReduceOp.MAX))
