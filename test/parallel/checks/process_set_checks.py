"""Process sets and GroupComm on real ranks: members, outsiders, several sets at once."""

from __future__ import annotations

import os
from functools import partial

import torch
from patterns import added, assert_job_usable, assert_same, raised, values

import perseus.torch.horovod as hvd
from perseus import process_sets
from perseus.process_sets import ids_and_ranks

SETTINGS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _mine(salt: int = 0) -> torch.Tensor:
    return values((17,), torch.float32, hvd.rank(), salt)


def _sum_of(ranks: list[int], salt: int = 0) -> torch.Tensor:
    return torch.stack([values((17,), torch.float32, rank, salt) for rank in ranks]).sum(dim=0)


def check_sets_are_refused_until_they_are_dynamic() -> None:
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    for call in (
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
    ):
        assert "Set HOROVOD_DYNAMIC_PROCESS_SETS=1" in raised(ValueError, call)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


def check_sets_come_and_go_with_the_same_ids_everywhere() -> None:
    last_rank = hvd.size() - 1
    everyone = list(range(hvd.size()))
    first, last = hvd.add_process_set([0]), hvd.add_process_set(hvd.ProcessSet([last_rank]))
    assert (first.process_set_id, last.process_set_id) == (1, 2)
    assert (first.size(), first.included()) == (1, hvd.rank() == 0)
    if first.included():
        assert first.rank() == 0
    else:
        assert "not part of provided process set" in raised(ValueError, first.rank)
    assert ids_and_ranks() == {0: everyone, 1: [0], 2: [last_rank]}
    assert str(first) == "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)"
    for again in ([0], everyone[::-1], first):
        text = raised(ValueError, partial(hvd.add_process_set, again))
        assert "duplicate process set" in text, text
    assert hvd.remove_process_set(last)
    assert hvd.remove_process_set(first)
    assert (first.process_set_id, first.size(), first.rank()) == (None, None, None)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    # The id that was freed first is used first; removed objects can be added again.
    assert hvd.add_process_set(first).process_set_id == 2
    assert hvd.add_process_set(last).process_set_id == 1
    assert hvd.remove_process_set(first)
    assert hvd.remove_process_set(last)
    assert_job_usable()


def check_ranks_that_do_not_exist_are_refused() -> None:
    for ranks in ([hvd.size()], [-1], [0, 0], []):
        text = raised(ValueError, partial(hvd.add_process_set, ranks))
        assert "expected one or more different ranks of 0" in text, text
    assert "expected a list of ranks" in raised(ValueError, lambda: hvd.ProcessSet(["a"]))


def check_ranks_must_add_the_same_set() -> None:
    text = raised(hvd.HorovodInternalError, lambda: hvd.add_process_set([hvd.rank()]))
    assert "Mismatched" in text, text
    assert list(ids_and_ranks()) == [0]
    assert_job_usable()


def check_members_work_and_outsiders_are_refused() -> None:
    if hvd.size() == 2:
        return  # a set of both would be the world
    members = [0, hvd.size() - 1]
    with added(members) as [inside]:
        if inside.included():
            index = members.index(hvd.rank())
            total = hvd.allreduce(_mine(), op=hvd.Sum, name="x", process_set=inside)
            assert_same(total, _sum_of(members))
            rows = torch.full((index + 1, 2), float(hvd.rank()))
            last = float(hvd.size() - 1)
            expected = torch.tensor([[0.0, 0.0], [last, last], [last, last]])
            assert_same(hvd.allgather(rows, name="x", process_set=inside), expected)
            received = hvd.broadcast(_mine(), members[1], name="x", process_set=inside)
            assert_same(received, values((17,), torch.float32, members[1]))
            part = hvd.reducescatter(_mine(), op=hvd.Sum, name="x", process_set=inside)
            assert_same(part, _sum_of(members).split([9, 8])[index])
            sent = torch.arange(4.0) + 10 * index
            halves = [(torch.arange(4.0) + 10 * i)[2 * index : 2 * index + 2] for i in (0, 1)]
            assert_same(hvd.alltoall(sent, name="x", process_set=inside), torch.cat(halves))
            assert "invalid root rank 1" in raised(
                ValueError, lambda: hvd.broadcast(_mine(), 1, name="y", process_set=inside)
            )
            hvd.barrier(process_set=inside)
        else:
            text = raised(ValueError, lambda: hvd.allreduce(_mine(), process_set=inside))
            assert f"Rank {hvd.rank()} is not a member of the provided process set" in text
        # The same name means something else in the world.
        everyone = list(range(hvd.size()))
        assert_same(hvd.allreduce(_mine(), op=hvd.Sum, name="x"), _sum_of(everyone))
    text = raised(ValueError, lambda: hvd.allreduce(_mine(), process_set=inside))
    assert "does not exist" in text, text


def check_sets_at_work_at_once_need_no_common_order() -> None:
    size = hvd.size()
    if size == 2:
        return
    pairs = [[a, b] for a in range(size) for b in range(a + 1, size)]
    with added(*pairs) as sets:
        mine = [process_set for process_set in sets if process_set.included()]
        mine = mine[hvd.rank() % len(mine) :] + mine[: hvd.rank() % len(mine)]
        started = []
        for salt in range(5):
            for pair in mine:
                handle = hvd.allreduce_async(
                    _mine(salt), op=hvd.Sum, name=f"p{salt}", process_set=pair
                )
                started.append((handle, pair.ranks, salt))
        for handle, ranks, salt in reversed(started):
            assert_same(hvd.synchronize(handle), _sum_of(ranks, salt))


def check_an_optimizer_on_a_set_trains_its_members_alone() -> None:
    members = [0, 2] if hvd.size() > 2 else [1]
    with added(members) as [inside]:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named_parameters=model.named_parameters(),
            process_set=inside,
        )
        model(torch.full((1, 3), float(hvd.rank() + 1))).sum().backward()
        optimizer.step()
        numbers = [rank + 1.0 for rank in members] if inside.included() else [hvd.rank() + 1.0]
        assert_same(model.weight.detach(), torch.full((1, 3), -sum(numbers) / len(numbers)))


def check_a_grid_of_groups() -> None:
    if hvd.size() != 4:
        text = raised(ValueError, lambda: hvd.GroupComm.grid(2))
        assert "do not make two or more rows" in text, text
        return
    row, column = hvd.GroupComm.grid(2)
    assert row.ranks == ([0, 1] if hvd.rank() < 2 else [2, 3])
    assert column.ranks == ([0, 2] if hvd.rank() % 2 == 0 else [1, 3])
    mine = torch.arange(4.0) + hvd.rank()
    assert_same(row.allreduce(mine, op=hvd.Sum), 2 * torch.arange(4.0) + sum(row.ranks))
    assert_same(column.allreduce_(mine.clone(), op=hvd.Max), torch.arange(4.0) + column.ranks[1])
    assert_same(column.allgather(mine[:1]), torch.tensor([float(r) for r in column.ranks]))
    expected = (2 * torch.arange(4.0) + sum(row.ranks)).split(2)[row.rank()]
    assert_same(row.reducescatter(mine, op=hvd.Sum), expected)
    exchanged = torch.cat([(torch.arange(4.0) + r).split(2)[row.rank()] for r in row.ranks])
    assert_same(row.alltoall(mine), exchanged)
    assert_same(column.broadcast(mine, column.ranks[1]), torch.arange(4.0) + column.ranks[1])
    assert_same(row.broadcast_(mine.clone(), row.ranks[0]), torch.arange(4.0) + row.ranks[0])
    column.barrier()
    # Differentiable, and usable wherever a process set is.
    leaf = mine.clone().requires_grad_()
    row.allreduce(leaf, op=hvd.Sum).sum().backward()
    assert_same(leaf.grad, torch.full((4,), 2.0))
    total = hvd.allreduce(mine, op=hvd.Sum, process_set=column)
    assert_same(total, 2 * torch.arange(4.0) + sum(column.ranks))


def check_a_group_of_any_ranks() -> None:
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [1]
    group = hvd.GroupComm(members)  # every rank makes it
    if group.included():
        n, index = len(members), group.rank()
        mine, whole = _mine(), _sum_of(members)
        assert_same(group.allreduce(mine, op=hvd.Sum), whole)
        torch.testing.assert_close(group.allreduce(mine), whole / n)
        assert_same(group.allreduce_(mine.clone(), op=hvd.Sum), whole)
        everyone = [values((17,), torch.float32, rank) for rank in members]
        assert_same(group.allgather(mine[: 3 + index]),
                    torch.cat([e[: 3 + i] for i, e in enumerate(everyone)]))  # fmt: skip
        assert_same(group.broadcast(mine, members[-1]), everyone[-1])
        rows = [17 // n + (i < 17 % n) for i in range(n)]
        assert_same(group.reducescatter(mine, op=hvd.Sum), whole.split(rows)[index])
        output, received = group.alltoall(mine, [index + 1] * n)
        parts = [e[(i + 1) * index : (i + 1) * (index + 1)] for i, e in enumerate(everyone)]
        assert_same(output, torch.cat(parts))
        assert received.tolist() == [i + 1 for i in range(n)]
        group.barrier()
    else:
        assert "is not a member" in raised(ValueError, lambda: group.allreduce(_mine()))
    assert hvd.remove_process_set(group)
    assert_job_usable()


def check_static_sets_are_registered_by_init() -> None:
    last = hvd.size() - 1
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([last])]
    hvd.init(process_sets=sets)
    assert [entry.process_set_id for entry in sets] == [1, 2]
    for entry in sets:
        if entry.included():
            assert_same(hvd.allreduce(_mine(), name="s", process_set=entry), _mine())
    hvd.barrier()  # a rank that leaves ends the world
    hvd.shutdown()
    hvd.init()
    assert list(ids_and_ranks()) == [0]
    assert sets[0].process_set_id is None
    hvd.shutdown()
    everyone = hvd.ProcessSet(range(last + 1))
    for wrong, fragment in (
        ([hvd.ProcessSet([0]), hvd.ProcessSet([0])], "is a duplicate"),
        ([everyone], "is a duplicate"),
        ([hvd.ProcessSet([last + 1])], "expected one or more different ranks"),
        ("static", 'expected a list or "dynamic"'),
    ):
        text = raised(ValueError, partial(hvd.init, process_sets=wrong))
        assert "Horovod initialization failed" in text, text
        assert fragment in text, text
        assert not hvd.is_initialized()
    try:
        hvd.init(process_sets="Dynamic")
        assert_job_usable()
    finally:
        # It holds until the process ends, and this process goes on to the checks of other modules.
        process_sets._made_dynamic = False


def check_static_sets_must_be_the_same_everywhere() -> None:
    mine = hvd.rank()
    hvd.shutdown()
    text = raised(
        ValueError, lambda: hvd.init(process_sets=[hvd.ProcessSet([0])] if mine == 0 else [])
    )
    assert "process sets differ: rank 0 has [[0]], rank 1 has []" in text, text
    hvd.init()
    assert_job_usable()
