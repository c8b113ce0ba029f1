"""Every collective × dtype × form, on values that differ per rank and index."""

from __future__ import annotations

import time
import zlib

import torch
from patterns import (
    ALL,
    FLOATS,
    INTEGERS,
    SHAPES,
    added,
    assert_same,
    everyone,
    raised,
    values,
    world_with,
)

import perseus.torch.horovod as hvd


def _reduced(stack: torch.Tensor, op: int, dtype: torch.dtype) -> torch.Tensor:
    if op == hvd.Sum:
        result = stack.sum(0)
    elif op == hvd.Average:
        result = stack.sum(0) / hvd.size()
    elif op == hvd.Min:
        result = stack.amin(0)
    elif op == hvd.Max:
        result = stack.amax(0)
    else:
        result = stack.prod(0)
    if dtype == torch.bool:
        return result != 0
    return (result if dtype.is_floating_point else result.trunc()).to(dtype)


def _wrapped_product(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Integer products wrap around as the dtype does."""
    result = values(shape, dtype, 0)
    for rank in range(1, hvd.size()):
        result = result * values(shape, dtype, rank)
    return result


def check_allreduce_of_every_dtype_and_op() -> None:
    for dtype in ALL:
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            if dtype == torch.bool and op == hvd.Average:
                continue
            for shape in SHAPES:
                mine = values(shape, dtype, hvd.rank())
                if op == hvd.Product and dtype in INTEGERS:
                    expected = _wrapped_product(shape, dtype)
                else:
                    expected = _reduced(everyone(shape, dtype), op, dtype)
                result = hvd.allreduce(mine, op=op, name=f"all.{dtype}.{op}.{shape}")
                if op == hvd.Average and dtype in FLOATS:
                    assert result.dtype == dtype and result.shape == shape
                    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
                    if dtype in (torch.float32, torch.float64):
                        torch.testing.assert_close(result, expected)
                else:
                    assert_same(result, expected)
                assert_same(mine, values(shape, dtype, hvd.rank()))


def check_average_of_bools_is_refused() -> None:
    raised(ValueError, lambda: hvd.allreduce(torch.tensor([True]), name="bool_average"))


def check_average_is_the_default_and_truncates_integers() -> None:
    whole = hvd.allreduce(torch.tensor([-1 if hvd.rank() == 0 else 0, 7 + hvd.rank()]))
    total = sum(7 + rank for rank in range(hvd.size()))
    assert whole.tolist() == [0, total // hvd.size()]


def check_average_argument_of_old_scripts() -> None:
    import warnings

    mine = torch.tensor([1.0 + hvd.rank()])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        total = hvd.allreduce(mine, average=False)
        mean = hvd.allreduce(mine, average=True)
    assert [entry.category for entry in seen] == [DeprecationWarning] * 2
    expected = sum(1.0 + rank for rank in range(hvd.size()))
    assert total.item() == expected
    assert abs(mean.item() - expected / hvd.size()) < 1e-6
    both = raised(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum))
    assert "supersedes average" in both


def check_scale_factors() -> None:
    mine = values((13,), torch.float32, hvd.rank())
    expected = everyone((13,), torch.float32).sum(0) * 0.5 * 4.0
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert_same(result, expected.to(torch.float32))
    # Integers are scaled in float64 and truncated towards zero, before and after.
    mine = values((13,), torch.int32, hvd.rank())
    halves = (everyone((13,), torch.int32) * 0.5).trunc().sum(0)
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    assert_same(result, (halves * 1.5).trunc().to(torch.int32))


def check_large_allreduce_gives_the_same_bits_everywhere() -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    for dtype in FLOATS:
        mine = torch.randn(300_007, generator=generator, dtype=torch.float64).to(dtype)
        all_ranks = hvd.allgather(mine.unsqueeze(0)).to(torch.float64)
        result = hvd.allreduce(mine, op=hvd.Sum, name=f"large.{dtype}")
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-5)
        torch.testing.assert_close(
            result.to(torch.float64), all_ranks.sum(0), rtol=tolerance, atol=tolerance
        )
        checksum = zlib.crc32(result.view(torch.uint8).numpy().tobytes())
        assert len(set(hvd.allgather_object(checksum, name=f"crc.{dtype}"))) == 1


def check_every_algorithm_gives_the_averages() -> None:
    def assert_average(ranks: list[int], process_set: hvd.ProcessSet, count: int) -> None:
        # Sums are exact, so it does not matter in which order they are taken.
        rows = [torch.arange(count) % 1000 * 12.0 * (rank + 1) + rank for rank in ranks]
        mine = rows[ranks.index(hvd.rank())]
        got = hvd.allreduce(mine, process_set=process_set, name=f"average.{count}")
        assert_same(got, torch.stack(rows).sum(0) * torch.tensor(1 / len(ranks)))

    everybody = list(range(hvd.size()))
    some = everybody[:3] if hvd.size() > 3 else everybody[:-1]
    for algorithm in ("auto", "pairwise", "halving_doubling", "ring", "recursive_doubling"):
        for levels in ({}, {"LIGHT_2D_ALLREDUCE": 1, "LIGHT_INTRA_SIZE": 2}):
            settings = {"PERSEUS_ALLREDUCE_ALGORITHM": algorithm, **levels}
            with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1, **settings), added(some) as (few,):
                for count in (1, 1001, 50_000):
                    assert_average(everybody, hvd.global_process_set, count)
                    if hvd.rank() in some:
                        assert_average(some, few, count)


def check_in_place_forms_write_into_their_argument() -> None:
    for dtype in ALL:
        mine = values((5, 7), dtype, hvd.rank())
        assert hvd.allreduce_(mine, op=hvd.Max, name=f"inplace.{dtype}") is mine
        assert_same(mine, _reduced(everyone((5, 7), dtype), hvd.Max, dtype))
        other = values((5, 7), dtype, hvd.rank(), salt=1)
        handle = hvd.allreduce_async_(other, op=hvd.Sum, name=f"inplace_async.{dtype}")
        assert hvd.synchronize(handle) is other
        assert_same(other, _reduced(everyone((5, 7), dtype, salt=1), hvd.Sum, dtype))


def check_asynchronous_operations_pair_by_name_in_any_order() -> None:
    order = list(range(20))
    if hvd.rank() % 2:
        order.reverse()
    handles = {
        i: hvd.allreduce_async(values((i + 1,), torch.float64, hvd.rank(), salt=i), name=f"o{i}",
                               op=hvd.Sum)
        for i in order
    }  # fmt: skip
    for i in reversed(order):
        expected = everyone((i + 1,), torch.float64, salt=i).sum(0)
        assert_same(hvd.synchronize(handles[i]), expected)


def check_poll_becomes_true_without_synchronize() -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="polled")
    assert isinstance(handle, int)
    deadline = time.monotonic() + 30
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert_same(hvd.synchronize(handle), torch.ones(3))
    assert hvd.synchronize(handle) is None
    gone = raised(ValueError, lambda: hvd.poll(handle))
    assert "was not created or has been cleared" in gone


def check_a_name_in_flight_is_refused_and_free_again_afterwards() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        text = raised(ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
        assert (
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another"
            " tensor that is currently being processed" in text
        )
    hvd.barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert_same(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))
    assert_same(hvd.allreduce(torch.ones(2), name="twice"), torch.ones(2))


def check_a_name_may_come_again_with_another_shape_and_dtype() -> None:
    for dtype, shape in ((torch.float32, (3,)), (torch.int64, (4, 2)), (torch.float32, (3,))):
        mine = values(shape, dtype, hvd.rank())
        expected = _reduced(everyone(shape, dtype), hvd.Sum, dtype)
        assert_same(hvd.allreduce(mine, name="again", op=hvd.Sum), expected)


def check_grouped_allreduce_in_all_forms() -> None:
    kinds = [(torch.float32, (4, 3)), (torch.int64, (7,)), (torch.float16, ()), (torch.uint8, (0,))]
    tensors = [values(shape, dtype, hvd.rank()) for dtype, shape in kinds]
    expected = [_reduced(everyone(shape, dtype), hvd.Sum, dtype) for dtype, shape in kinds]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert isinstance(results, list)
    for result, right in zip(results, expected, strict=True):
        assert_same(result, right)
    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum)
    for result, right in zip(hvd.synchronize(handle), expected, strict=True):
        assert_same(result, right)
    for tensor, (dtype, shape) in zip(tensors, kinds, strict=True):
        assert_same(tensor, values(shape, dtype, hvd.rank()))
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for result, tensor, right in zip(results, tensors, expected, strict=True):
        assert result is tensor
        assert_same(result, right)
    raised(ValueError, lambda: hvd.grouped_allreduce([]))


def check_a_group_has_each_tensor_once() -> None:
    """Its results would be sums of sums, and not the same ones on all ranks."""
    whole = values((8,), torch.float32, hvd.rank())
    for twice in ([whole, whole], [whole[3:], whole[:4]]):
        text = raised(ValueError, lambda tensors=twice: hvd.grouped_allreduce_(tensors))
        assert "would overlap in memory: pass every tensor once" in text
    assert_same(whole, values((8,), torch.float32, hvd.rank()))
    for result in hvd.grouped_allreduce([whole, whole], op=hvd.Sum):
        assert_same(result, _reduced(everyone((8,), torch.float32), hvd.Sum, torch.float32))
    hvd.grouped_allreduce_([whole[4:], whole[:4]], op=hvd.Sum)
    assert_same(whole, _reduced(everyone((8,), torch.float32), hvd.Sum, torch.float32))


def check_many_small_tensors_at_once() -> None:
    tensors = [values((1000,), torch.float32, hvd.rank(), salt=i) for i in range(500)]
    handles = [hvd.allreduce_async_(t, name=f"many.{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
    for i, handle in enumerate(handles):
        expected = everyone((1000,), torch.float32, salt=i).sum(0).to(torch.float32)
        assert_same(hvd.synchronize(handle), expected)


def check_compression_restores_the_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        mine = values((9,), dtype, hvd.rank())
        result = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert_same(result, _reduced(everyone((9,), dtype), hvd.Sum, dtype))


def check_channels_last_tensors_keep_their_layout() -> None:
    shape = (2, 3, 4, 5)
    mine = values(shape, torch.float32, hvd.rank()).to(memory_format=torch.channels_last)
    expected = everyone(shape, torch.float32).sum(0).to(torch.float32)
    result = hvd.allreduce(mine, op=hvd.Sum, name="channels_last")
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert_same(result, expected)
    assert_same(hvd.allreduce_(mine, op=hvd.Sum, name="channels_last_"), expected)
    copied = hvd.broadcast(expected.to(memory_format=torch.channels_last) + hvd.rank(), 0)
    assert_same(copied, expected)
    for shape in ((2, 3, 4, 5), (3, 3, 3, 3)):
        mixed = values(shape, torch.float32, hvd.rank())
        if hvd.rank() == 0:
            mixed = mixed.to(memory_format=torch.channels_last)
        text = raised(hvd.HorovodInternalError, lambda m=mixed: hvd.allreduce(m, name="mixed"))
        assert "Mismatched ALLREDUCE memory layouts: One rank's tensor" in text
        state = {"mixed": mixed}
        text = raised(hvd.HorovodInternalError, lambda s=state: hvd.broadcast_parameters(s, 0))
        assert "Mismatched BROADCAST memory layouts" in text


def check_tensors_with_gaps_are_refused() -> None:
    gaps = torch.arange(10.0)[::2]
    for call in (
        lambda: hvd.allreduce(gaps),
        lambda: hvd.allgather(gaps),
        lambda: hvd.broadcast_(gaps, 0),
        lambda: hvd.alltoall(gaps, [5] + [0] * (hvd.size() - 1)),
        lambda: hvd.reducescatter(torch.ones(6, 4).t()),
        lambda: hvd.grouped_allreduce([torch.ones(2), gaps]),
        lambda: hvd.grouped_allreduce_([torch.ones(2), gaps]),
        lambda: hvd.grouped_allgather([torch.ones(2), gaps]),
        lambda: hvd.grouped_reducescatter([torch.ones(2), gaps]),
    ):
        assert "Tensor is required to be contiguous." in raised(ValueError, call)
    hvd.barrier()


def check_allgather_joins_different_numbers_of_rows() -> None:
    for dtype in ALL:
        for rows in (lambda r: r + 1, lambda r: r, lambda r: 3 if r == 0 else 0, lambda r: 0):
            parts = [values((rows(r), 3), dtype, r) for r in range(hvd.size())]
            result = hvd.allgather(parts[hvd.rank()], name=f"gather.{dtype}.{rows(0)}.{rows(1)}")
            assert_same(result, torch.cat(parts))
    result += result  # the memory belongs to the tensor


def check_allgather_of_one_and_three_dimensions() -> None:
    for shape in ((4,), (2, 3, 5)):
        parts = [values(shape, torch.float32, r) for r in range(hvd.size())]
        handle = hvd.allgather_async(parts[hvd.rank()])
        assert_same(hvd.synchronize(handle), torch.cat(parts))
    raised(IndexError, lambda: hvd.allgather(torch.tensor(1.0)))


def check_grouped_allgather() -> None:
    lists = [
        [
            values((r + 1, 2), torch.float32, r),
            values((3,), torch.bool, r),
            values((0, 4), torch.int8, r),
        ]
        for r in range(hvd.size())
    ]
    results = hvd.grouped_allgather(lists[hvd.rank()], name="gathers")
    for i, result in enumerate(results):
        assert_same(result, torch.cat([tensors[i] for tensors in lists]))
    handle = hvd.grouped_allgather_async(lists[hvd.rank()])
    assert len(hvd.synchronize(handle)) == 3


def check_broadcast_from_every_root() -> None:
    for root in range(hvd.size()):
        for dtype in ALL:
            for shape in ((), (0,), (6, 5)):
                mine = values(shape, dtype, hvd.rank(), salt=root)
                right = values(shape, dtype, root, salt=root)
                result = hvd.broadcast(mine, root, name=f"b.{root}.{dtype}.{shape}")
                assert_same(result, right)
                assert_same(mine, values(shape, dtype, hvd.rank(), salt=root))
                assert hvd.broadcast_(mine, root) is mine
                assert_same(mine, right)
    big = torch.arange(500_000.0) * (hvd.rank() + 1)
    handle = hvd.broadcast_async(big, hvd.size() - 1)
    assert_same(hvd.synchronize(handle), torch.arange(500_000.0) * hvd.size())


def check_alltoall_in_equal_parts() -> None:
    n = hvd.size()
    for dtype in ALL:
        for rows in (0, 1, 3):
            blocks = [values((rows * n, 2), dtype, r) for r in range(n)]
            first = rows * hvd.rank()
            right = torch.cat([block[first : first + rows] for block in blocks])
            assert_same(hvd.alltoall(blocks[hvd.rank()], name=f"a2a.{dtype}.{rows}"), right)
    text = raised(ValueError, lambda: hvd.alltoall(torch.ones(n + 1)))
    assert "not an even multiple of the number of workers" in text
    hvd.barrier()


def check_alltoall_with_splits() -> None:
    n, rank = hvd.size(), hvd.rank()
    # Rank r sends r + d rows to rank d, and leaves one row over.
    splits = [[r + d for d in range(n)] for r in range(n)]
    blocks = [values((sum(splits[r]) + 1, 3), torch.float32, r) for r in range(n)]
    right = torch.cat([blocks[r].split([*splits[r], 1])[rank] for r in range(n)])
    for given in (splits[rank], torch.tensor(splits[rank], dtype=torch.int32)):
        output, received = hvd.alltoall(blocks[rank], given)
        assert_same(output, right)
        assert_same(received, torch.tensor([splits[r][rank] for r in range(n)], dtype=torch.int32))
    nothing, received = hvd.synchronize(hvd.alltoall_async(torch.ones(2, 5), [0] * n))
    assert nothing.shape == (0, 5) and received.tolist() == [0] * n
    for bad, fragment in (
        (torch.ones(n, 1, dtype=torch.int32), "alltoall expects a 1D splits tensor"),
        (torch.ones(n, dtype=torch.int64), "expects splits to contain 32-bit integer elements"),
        ([1] * (n + 1), "Number of entries in splits does not equal number of workers"),
        ([0.5] * n, "expects splits to contain 32-bit integer elements"),
        ([], "Number of entries in splits does not equal number of workers"),
        ([-1] + [0] * (n - 1), "splits must not be negative"),
        ([9] * n, "Sum of splits entries is greater than the first dimension"),
    ):
        assert fragment in raised(ValueError, lambda bad=bad: hvd.alltoall(torch.ones(n), bad))
    hvd.barrier()


def check_reducescatter_with_uneven_rows() -> None:
    n, rank = hvd.size(), hvd.rank()
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        for rows in (0, 1, n, 2 * n + 1, 3 * n - 1):
            mine = values((rows, 3), dtype, rank)
            total = _reduced(everyone((rows, 3), dtype), hvd.Sum, dtype)
            sizes = [rows // n + (r < rows % n) for r in range(n)]
            right = total.split(sizes)[rank]
            result = hvd.reducescatter(mine, op=hvd.Sum, name=f"rs.{dtype}.{rows}")
            assert_same(result, right)
            assert_same(mine, values((rows, 3), dtype, rank))
    text = raised(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.ones(n), op=hvd.Max))
    assert "only supports AVERAGE and SUM" in text
    hvd.barrier()


def check_reducescatter_averages_by_default_and_scales() -> None:
    n, rank = hvd.size(), hvd.rank()
    mine = values((2 * n, 3), torch.float64, rank)
    mean = everyone((2 * n, 3), torch.float64).mean(0)
    torch.testing.assert_close(hvd.reducescatter(mine), mean.split(2)[rank])
    scaled = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.25, postscale_factor=8.0)
    assert_same(scaled, (mean * n * 2.0).round().split(2)[rank])


def check_grouped_reducescatter() -> None:
    n, rank = hvd.size(), hvd.rank()
    shapes = [(n + 1, 2), (n,), (1, 3)]
    tensors = [values(shape, torch.float32, rank) for shape in shapes]
    results = hvd.grouped_reducescatter(tensors, op=hvd.Sum, name="scatters")
    for shape, result in zip(shapes, results, strict=True):
        sizes = [shape[0] // n + (r < shape[0] % n) for r in range(n)]
        total = everyone(shape, torch.float32).sum(0).to(torch.float32)
        assert_same(result, total.split(sizes)[rank])
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async(tensors))) == len(shapes)


def check_barrier_waits_for_the_last_rank() -> None:
    hvd.barrier()
    time.sleep(0.15 * hvd.rank())  # each rank is later than the one before
    arrived = torch.tensor([time.monotonic()], dtype=torch.float64)
    hvd.barrier()
    left = time.monotonic()
    assert left >= hvd.allgather(arrived).max().item()


def check_who_am_i() -> None:
    n = hvd.size()
    assert hvd.is_initialized()
    assert [r for r, _, _ in hvd.allgather_object((hvd.rank(), 0, 0))] == list(range(n))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), n)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_enabled() and not hvd.mpi_enabled()
    assert hvd.global_process_set.ranks == list(range(n))
    assert (hvd.global_process_set.rank(), hvd.global_process_set.size()) == (hvd.rank(), n)
    hvd.init()  # while running: nothing happens
    assert hvd.size() == n
