"""join on real ranks: uneven data with the optimizer, and what fails meanwhile."""

from __future__ import annotations

import torch
from patterns import assert_job_usable, assert_same, raised, values

import perseus.torch.horovod as hvd


def check_ranks_with_less_data_give_zeros() -> None:
    size = hvd.size()
    for epoch in range(2):
        for step in range(2 + 2 * hvd.rank()):
            active = [rank for rank in range(size) if step < 2 + 2 * rank]
            mine = values((31,), torch.float32, hvd.rank(), step)
            parts = torch.stack([values((31,), torch.float32, rank, step) for rank in active])
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name=f"{epoch}.{step}")
            assert_same(hvd.allreduce(mine, op=hvd.Sum, name="same"), parts.sum(dim=0))
            assert_same(hvd.synchronize(handle), parts.sum(dim=0))
            group = hvd.grouped_allreduce([mine, mine.double()], op=hvd.Sum, name="group")
            assert_same(group[1], parts.double().sum(dim=0))
        assert hvd.join() == size - 1
        assert_job_usable()


def check_average_divides_by_all_ranks() -> None:
    if hvd.rank() == 0:
        assert hvd.join(device=0) == hvd.size() - 1
        return
    # Zeros of rank 0 first, then of all but the last.
    while hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Sum, name="count") != 1:
        if hvd.rank() != hvd.size() - 1:
            break
    if hvd.rank() == hvd.size() - 1:
        assert_same(hvd.allreduce(torch.ones(3), name="a"), torch.full((3,), 1 / hvd.size()))
        assert_same(hvd.allreduce(torch.full((3,), -5.0), op=hvd.Max, name="b"), torch.zeros(3))
    assert hvd.join() == hvd.size() - 1


def check_uneven_batches_train_the_same_model_everywhere() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(1 + hvd.rank()):
        optimizer.zero_grad()
        model(values((4, 5), torch.float32, hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    # The rank that was last has taken every step; its model is everybody's after a broadcast.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = hvd.allgather(flat[None], name="flat")
    assert torch.equal(gathered, flat.expand_as(gathered))


def check_other_collectives_fail_and_the_rank_can_join() -> None:
    if hvd.rank() == 0:
        assert hvd.join() != 0
    else:
        count = torch.ones(1, dtype=torch.int64)
        while hvd.allreduce(count, op=hvd.Sum, name="count2") == hvd.size():
            pass
        for call, text in (
            (
                lambda: hvd.allgather(torch.ones(2), name="g"),
                "Allgather is not supported with Join",
            ),
            (lambda: hvd.broadcast(torch.ones(2), 1, name="b"), "Broadcast is not supported"),
            (lambda: hvd.alltoall(torch.ones(hvd.size()), name="t"), "Alltoall is not supported"),
            (lambda: hvd.reducescatter(torch.ones(9), name="r"), "Reducescatter is not supported"),
        ):
            assert text in raised(hvd.HorovodInternalError, call)
        hvd.barrier()
        assert hvd.join() != 0
    assert_job_usable()
