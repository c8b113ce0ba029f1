"""torch.distributed on the backend "perseus": collectives for which nobody has waited."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from patterns import assert_same, everyone, raised
from process_groups import mine, of, process_group

import perseus.torch.horovod as hvd
from perseus.torch.distributed import backend


def _barriers() -> list[Callable[[], object]]:
    return [
        dist.barrier,
        lambda: dist.group.WORLD.barrier().wait(),
        lambda: dist.group.WORLD.barrier().get_future().wait(),
    ]


def check_a_barrier_waits_for_what_its_rank_has_started() -> None:
    with process_group():
        for turn, barrier in enumerate(_barriers() * 4):
            salts = range(turn, turn + 16)
            tensors = [mine((10_000,), torch.float32, salt) for salt in salts]
            kept = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            if turn % 2 == 0:
                kept.clear()
            barrier()
            for tensor, salt in zip(tensors, salts, strict=True):
                assert_same(tensor, everyone((10_000,), torch.float32, salt).sum(0).float())
            for work in kept:
                assert work.is_completed() and work.wait()


def _dropped(salt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Start collectives and drop their handles; return what they write, with what they should."""
    rank, size = hvd.rank(), hvd.size()
    shape, kind = (6,), torch.int64
    every = [of(other, shape, kind, salt) for other in range(size)]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def expect(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        found.extend(zip(outputs, expected, strict=True))

    gathered = [torch.full(shape, -1) for _ in range(size)]
    dist.all_gather(gathered, every[rank], async_op=True)
    expect(gathered, every)
    at_root = [torch.full(shape, -1) for _ in range(size)] if rank == size - 1 else None
    dist.gather(every[rank], at_root, size - 1, async_op=True)
    expect(at_root or [], every if at_root else [])
    part = torch.full(shape, -1)
    dist.scatter(part, every if rank == 0 else None, 0, async_op=True)
    expect([part], [every[rank]])
    received = torch.full((size,), -1)
    dist.all_to_all_single(received, torch.arange(size) + 10 * rank, async_op=True)
    expect([received], [10 * torch.arange(size) + rank])
    bits = torch.tensor([1 << rank, 4 + rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR, async_op=True)
    joint = 4
    for other in range(size):
        joint |= 4 + other
    expect([bits], [torch.tensor([(1 << size) - 1, joint])])
    turned = mine((3, 5), kind, salt).t()
    dist.all_reduce(turned, async_op=True)
    expect([turned], [everyone((3, 5), kind, salt).sum(0).to(kind).t()])
    sizes = [other + 1 for other in range(size)]
    uneven = torch.full((sizes[rank],), -1)
    dist.reduce_scatter(uneven, [torch.full((n,), n + rank) for n in sizes], async_op=True)
    expect([uneven], [torch.full((rank + 1,), sum(rank + 1 + other for other in range(size)))])
    return found


def check_collectives_are_written_though_their_handles_are_dropped() -> None:
    with process_group():
        for turn, barrier in enumerate(_barriers()):
            found = _dropped(turn)
            gc.collect()
            barrier()
            for output, expected in found:
                assert_same(output, expected)
        found = _dropped(9)
    for output, expected in found:  # destroy_process_group() has waited
        assert_same(output, expected)


def check_a_barrier_does_not_wait_for_receives() -> None:
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        target = torch.full((2, 3), torch.nan).t()
        if rank == 0:
            dist.irecv(target, size - 1)  # into a tensor that is not row-major
        dist.barrier()
        if rank == size - 1:
            dist.send(mine((3, 2), torch.float32), 0)
        arrived = torch.zeros(())
        while not arrived:  # each collective looks whether it has come
            arrived.fill_(float(rank != 0 or not bool(target.isnan().any())))
            dist.all_reduce(arrived, dist.ReduceOp.MIN)
        if rank == 0:
            assert_same(target, of(size - 1, (3, 2), torch.float32))


def check_a_barrier_raises_what_nobody_else_gets() -> None:
    with process_group():
        kept = dist.all_reduce(torch.ones(2 + (hvd.rank() == 0)), async_op=True)
        dist.barrier()  # its owner gets it
        assert "Mismatched" in raised(dist.DistBackendError, kept.wait)
        dist.all_reduce(torch.ones(2 + (hvd.rank() == 0)), async_op=True)
        assert "Mismatched" in raised(dist.DistBackendError, dist.barrier)
        dist.barrier()
        tensor = mine((5,), torch.float32)
        dist.all_reduce(tensor)  # the group goes on
        assert_same(tensor, everyone((5,), torch.float32).sum(0).float())


def check_works_that_nobody_waits_for_do_not_pile_up() -> None:
    with process_group():
        started = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        for _ in range(1000):
            dist.all_reduce(torch.ones(3), async_op=True)
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        world = backend._group_of(dist.group.WORLD, "cpu").world
        assert len(world.pending._begun) <= 200 and len(world.pending.left) <= 200
        dist.barrier()
        assert not world.pending.left and not world.pending._begun
        for work in started:
            assert work.is_completed() and work.wait()


def check_barriers_that_nobody_waits_for_do_not_hold_each_other() -> None:
    with process_group():
        gathered = [torch.full((1, 2), -1.0) for _ in range(hvd.size())]
        for _ in range(1500):
            dist.all_gather(gathered, mine((1, 2), torch.float32), async_op=True)
            dist.barrier(async_op=True)
        kept = [dist.barrier(async_op=True) for _ in range(300)]
        dist.barrier()
        for other, part in enumerate(gathered):
            assert_same(part, of(other, (1, 2), torch.float32))
        for work in kept:
            assert work.wait()
        world = backend._group_of(dist.group.WORLD, "cpu").world
        while world.pending.left:  # barriers, which no barrier waits for
            world.pending.end_left()
        assert not world.pending._begun and not world.operations.open_handles()


def check_what_follows_a_failed_part_is_ended() -> None:
    with process_group():
        rank, size = hvd.rank(), hvd.size()
        wrong = torch.ones(2 + (rank == 0))
        right = mine((4,), torch.float32)
        first = [torch.empty_like(wrong) for _ in range(size)]
        second = [torch.full((4,), -1.0) for _ in range(size)]
        outputs = [[first[i], second[i]] for i in range(size)]
        dist.group.WORLD.allgather_coalesced(outputs, [wrong, right])
        assert "Mismatched" in raised(dist.DistBackendError, dist.barrier)
        for other, part in enumerate(second):
            assert_same(part, of(other, (4,), torch.float32))
        world = backend._group_of(dist.group.WORLD, "cpu").world
        assert not world.operations.open_handles()


def check_groups_end_though_no_rank_answers_what_is_left() -> None:
    began = time.monotonic()
    with process_group(seconds=300):
        outputs = [torch.empty(2) for _ in range(hvd.size())]
        if hvd.rank() == 0:
            dist.all_reduce(torch.ones(2), async_op=True)
        else:
            dist.all_gather(outputs, torch.ones(2), async_op=True)
        kept = dist.all_reduce(torch.ones(5 + hvd.rank()), async_op=True)
    assert time.monotonic() - began < 200
    raised(dist.DistBackendError, kept.wait)
