"""Process sets with every collective, form and dtype; their gradients, optimizers, and join."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from adasum_checks import DTYPES, adasum_of
from autograd_checks import assert_gradients_are_slopes
from form_checks import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    OPS,
    REDUCESCATTER,
    assert_close,
    cases,
    own_rows,
    reference,
    tensors_of,
)
from patterns import added, assert_same, raised, values
from torch import nn

import perseus.torch.horovod as hvd

SETTINGS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _sets() -> list[list[int]]:
    """Overlapping and disjoint ones, of one rank and of several, none of which is the world."""
    n = hvd.size()
    wanted = [[0], list(range(1, n)), [0, n - 1], list(range(n - 1))]
    return [ranks for i, ranks in enumerate(wanted) if ranks not in wanted[:i] and len(ranks) < n]


def _own_sets(sets: list[hvd.ProcessSet]) -> Iterator[hvd.ProcessSet]:
    """Those with this rank; in the others it is refused, whatever it calls."""
    for process_set in sets:
        if process_set.included():
            yield process_set
            continue
        for form in [*ALLREDUCE, *ALLGATHER, *BROADCAST, *ALLTOALL, *REDUCESCATTER]:
            given = [torch.ones(12)] if form.group else torch.ones(12)
            root = [process_set.ranks[0]] if form in BROADCAST else []
            text = raised(
                ValueError,
                lambda form=form, given=given, root=root, process_set=process_set: form.function(
                    given, *root, process_set=process_set
                ),
            )
            assert "is not a member of the provided process set" in text, (form, text)


def check_reductions_in_every_form_and_dtype() -> None:
    with added(*_sets()) as sets:
        for process_set in _own_sets(sets):
            for index, (dtype, form, name) in enumerate(cases([*ALLREDUCE, *REDUCESCATTER])):
                scatters = form in REDUCESCATTER
                op = OPS[index % (2 if scatters else len(OPS))]
                if op == hvd.Average and dtype == torch.bool:
                    op = hvd.Sum
                plain = dtype == torch.bool or op in (hvd.Min, hvd.Max, hvd.Product)
                pre, post = (1.0, 1.0) if plain else (1.5, 0.5)
                results = form.run(
                    tensors_of(hvd.rank(), dtype), name, op=op, prescale_factor=pre,
                    postscale_factor=post, process_set=process_set,
                )  # fmt: skip
                for i, result in enumerate(results):
                    whole = reference(i, dtype, op, pre, post, members=process_set.ranks)
                    right = own_rows(whole, process_set) if scatters else whole
                    assert_close(result, right, dtype)


def check_moving_data_in_every_form_and_dtype() -> None:
    with added(*_sets()) as sets:
        for process_set in _own_sets(sets):
            members, inside = process_set.ranks, {"process_set": process_set}
            n, index = process_set.size(), process_set.rank()
            for dtype, form, name in cases(ALLGATHER):
                # Other numbers of rows on each member, none on the first.
                everyone = [tensors_of(r, dtype, rows=n) for r in members]
                everyone = [[t[:i].clone() for t in ts] for i, ts in enumerate(everyone)]
                for i, result in enumerate(form.run(everyone[index], name, **inside)):
                    assert_same(result, torch.cat([tensors[i] for tensors in everyone]))
            for dtype, form, name in cases(BROADCAST):
                root = members[-1]  # a rank of the world
                results = form.run(tensors_of(hvd.rank(), dtype), name, root, **inside)
                for result, right in zip(results, tensors_of(root, dtype), strict=True):
                    assert_same(result, right)
            splits = [[(i + 2 * d) % 3 for d in range(n)] for i in range(n)]
            for dtype, form, name in cases(ALLTOALL):
                everyone = [tensors_of(r, dtype, rows=2 * n) for r in members]
                for i, result in enumerate(form.run(everyone[index], name, **inside)):
                    parts = [tensors[i].split(2)[index] for tensors in everyone]
                    assert_same(result, torch.cat(parts))
                results = form.run(everyone[index], f"{name}.splits", splits[index], **inside)
                for i, (result, received) in enumerate(results):
                    parts = [
                        tensors[i].split([*row, 2 * n - sum(row)])[index]
                        for tensors, row in zip(everyone, splits, strict=True)
                    ]
                    assert_same(result, torch.cat(parts))
                    assert received.tolist() == [row[index] for row in splits]


def check_what_is_no_tensor_and_what_is_sparse() -> None:
    with added(*_sets()) as sets:
        for process_set in _own_sets(sets):
            members, inside = process_set.ranks, {"process_set": process_set}
            mine = {"rank": hvd.rank(), "text": "x" * hvd.rank()}
            found = hvd.broadcast_object(mine, members[-1], **inside)
            assert found == {"rank": members[-1], "text": "x" * members[-1]}
            assert [o["rank"] for o in hvd.allgather_object(mine, **inside)] == members
            for dtype, tolerance in DTYPES:
                parts = [values((7, 3), torch.float64, rank) for rank in members]
                part = values((7, 3), dtype, hvd.rank())
                result = hvd.allreduce(part, op=hvd.Adasum, name="adasum", **inside)
                right = adasum_of(parts)
                torch.testing.assert_close(
                    result.double(), right, rtol=tolerance, atol=tolerance
                )  # fmt: skip
            sparse = [
                torch.eye(5, dtype=torch.float64)[: rank + 1] * (rank + 1) for rank in members
            ]
            padded = [torch.cat([s, torch.zeros(5 - len(s), 5)]) for s in sparse]
            own = padded[process_set.rank()].to_sparse(1)
            reduced = hvd.sparse_allreduce_async(own, "sparse", hvd.Average, **inside)()
            torch.testing.assert_close(reduced.to_dense(), torch.stack(padded).mean(0))


def check_gradients() -> None:
    with added(*_sets()) as sets:
        for process_set in sets:
            if process_set.included():
                assert_gradients_are_slopes(process_set)


class _Words(nn.Module):
    """A sparse table and a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=sparse)
        self.layer = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Two numbers for each row of words."""
        return self.layer(torch.tanh(self.table(words).sum(1)))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, 9, (rank + 2, 4), generator=generator)  # uneven batches
    return model(words).square().sum()


def check_optimizers_of_every_kind_train_the_members_alone() -> None:
    table: list[tuple[bool, dict[str, Any]]] = [
        (False, {}),
        (False, {"groups": 2, "op": hvd.Sum}),
        (False, {"gradient_predivide_factor": 2.0}),
        (True, {}),
        (True, {"groups": 1}),
        (True, {"sparse_as_dense": True, "groups": 1}),
    ]
    with added(*_sets()) as sets:
        for sparse, options in table:
            for process_set in sets:  # a rank trains in one after the other, or alone
                torch.manual_seed(3)
                model = _Words(sparse).double()
                reference_model = copy.deepcopy(model)
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(),
                    process_set=process_set, **options,
                )  # fmt: skip
                plain = torch.optim.SGD(reference_model.parameters(), lr=0.05)
                ranks = process_set.ranks if process_set.included() else [hvd.rank()]
                for step in range(3):
                    optimizer.zero_grad()
                    _loss(model, step, hvd.rank()).backward()
                    optimizer.step()
                    plain.zero_grad()
                    total = sum(_loss(reference_model, step, rank) for rank in ranks)
                    (total if options.get("op") == hvd.Sum else total / len(ranks)).backward()
                    plain.step()
                for mine, right in zip(
                    model.parameters(), reference_model.parameters(), strict=True
                ):
                    torch.testing.assert_close(mine, right)


def check_sets_and_the_world_do_not_wait_for_each_other() -> None:
    last = hvd.size() - 1
    with added(*_sets()) as sets:
        mine = [process_set for process_set in sets if process_set.included()]
        if hvd.rank() != last:
            pending = [hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="w")]
            # Sets with the last rank are kept waiting, too.
            for process_set in mine:
                inside = {"name": "p", "process_set": process_set, "op": hvd.Sum}
                if last in process_set.ranks:
                    pending.append(hvd.allreduce_async(torch.ones(3), **inside))
                else:
                    whole = hvd.allreduce(torch.ones(3), **inside)
                    assert_same(whole, torch.full((3,), float(process_set.size())))
            assert not any(hvd.poll(handle) for handle in pending)
        # Only now does the last rank know that the others are through.
        hvd.allreduce(torch.zeros(1), name="go")
        if hvd.rank() == last:
            pending = [hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="w")]
            for process_set in mine:
                inside = {"name": "p", "process_set": process_set, "op": hvd.Sum}
                pending.append(hvd.allreduce_async(torch.ones(3), **inside))
        sizes = [hvd.size()] + [
            process_set.size() for process_set in mine if last in process_set.ranks
        ]
        found = [hvd.synchronize(handle)[0].item() for handle in pending]
        assert found == [float(size) for size in sizes], (found, sizes)


def _many(step: int, rank: int, count: int) -> list[torch.Tensor]:
    """Small tensors of several dtypes that share buckets."""
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.uint8)
    return [values((5 + i,), dtypes[i % 5], rank, salt=step + i) for i in range(count)]


def _reduce_many(step: int, ranks: list[int], count: int) -> None:
    """All in flight at once in the world, to which `ranks` still give something."""
    mine = _many(step, hvd.rank(), count)
    handles = [hvd.allreduce_async(t, op=hvd.Sum, name=f"m.{i}") for i, t in enumerate(mine)]
    group = hvd.grouped_allreduce_async(mine[:3], op=hvd.Sum, name="g")
    everyone = [_many(step, rank, count) for rank in ranks]
    for i, handle in enumerate([*handles, group]):
        results = hvd.synchronize(handle)
        for j, result in enumerate([results] if i < count else results):
            parts = torch.stack([tensors[i if i < count else j] for tensors in everyone])
            right = parts.any(0) if result.dtype == torch.bool else parts.sum(0)
            assert_same(result, right.to(result.dtype))


def check_join_with_fused_tensors_while_sets_are_at_work() -> None:
    n, rank = hvd.size(), hvd.rank()
    others = list(range(1, n))
    with added(others) as [rest]:
        for step in range(2):  # all names are known then
            _reduce_many(step, list(range(n)), 20)
        if rank > 0:
            count = torch.ones(1, dtype=torch.int32)
            while hvd.allreduce(count, op=hvd.Sum, name="here") == n:
                pass  # until rank 0 has joined
            for step in range(2, 5):
                _reduce_many(step, others, 20 + 5 * step)  # known names and new ones
                # The set knows nothing of the join.
                inside = {"process_set": rest, "name": f"s.{step}"}
                mine = values((n, 2), torch.float64, rank, step)
                parts = [values((n, 2), torch.float64, r, step) for r in others]
                assert_same(hvd.allgather(mine, **inside), torch.cat(parts))
                assert_same(hvd.broadcast(mine, n - 1, **inside), parts[-1])
                total = torch.stack(parts).sum(0)
                found = hvd.reducescatter(mine, op=hvd.Sum, **inside)
                assert_same(found, own_rows(total, rest))
                mean = hvd.allreduce(mine, **inside)
                torch.testing.assert_close(mean, total / len(others))
                hvd.barrier(process_set=rest)
        last = hvd.join()
        assert last != 0 and last == hvd.broadcast_object(last, 0, "last")
