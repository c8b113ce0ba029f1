"""Sparse tensors: sparse_allreduce_async, and sparse gradients in DistributedOptimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from patterns import (
    assert_job_usable,
    assert_same,
    nan_check,
    raised,
    stderr_lines,
    values,
    world_with,
)
from torch import nn

import perseus.torch.horovod as hvd
from perseus.errors import NanGradientError

ROWS, WIDTH = 12, 3  # rows divide by 2, 3 and 4


def _sparse(rank: int, dtype: torch.dtype = torch.float64, entries: int = 4) -> torch.Tensor:
    """A rank's tensor: indices that come twice, that others have too, and that only it has."""
    indices = torch.tensor([[(rank * 3 + i * i) % ROWS for i in range(entries)]])
    return torch.sparse_coo_tensor(
        indices.view(1, entries), values((entries, WIDTH), dtype, rank), (ROWS, WIDTH),
        check_invariants=True,
    )  # fmt: skip


def _dense_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.to_dense() for tensor in tensors]).sum(0)


def check_the_handle_is_a_function_that_gives_the_sum_or_mean() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        ranks = [_sparse(r, dtype) for r in range(hvd.size())]
        total = _dense_sum([tensor.to(torch.float64) for tensor in ranks])
        mean = total / hvd.size()
        for op, right in ((hvd.Sum, total), (hvd.Average, mean)):
            finish = hvd.sparse_allreduce_async(ranks[hvd.rank()], f"sparse.{dtype}.{op}", op)
            assert callable(finish)
            result = finish()
            assert result.layout == torch.sparse_coo and result.is_coalesced()
            assert result.shape == (ROWS, WIDTH)
            expected = right if dtype.is_floating_point else right.trunc()
            torch.testing.assert_close(result.to_dense(), expected.to(dtype))


def check_uneven_numbers_of_entries_and_none_at_all() -> None:
    n = hvd.size()
    for counts in (list(range(n)), [0] * n, [5] + [0] * (n - 1)):
        ranks = [_sparse(r, entries=counts[r]) for r in range(n)]
        result = hvd.sparse_allreduce_async(ranks[hvd.rank()], "uneven", op=hvd.Sum)()
        assert_same(result.to_dense(), _dense_sum(ranks))


def check_several_in_flight_finish_in_any_order() -> None:
    n = hvd.size()
    finish = {
        i: hvd.sparse_allreduce_async(_sparse(hvd.rank() + i), f"flight.{i}", hvd.Sum)
        for i in (range(5) if hvd.rank() else reversed(range(5)))
    }
    for i in (3, 0, 4, 1, 2):
        assert_same(finish[i]().to_dense(), _dense_sum([_sparse(r + i) for r in range(n)]))


def check_more_sparse_dimensions_and_no_dense_ones() -> None:
    def tensor(rank: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([[rank, 2], [0, 1]]), values((2,), torch.float64, rank), (9, 4),
            check_invariants=True,
        )  # fmt: skip

    ranks = [tensor(r) for r in range(hvd.size())]
    for name in (None, "two"):
        result = hvd.sparse_allreduce_async(ranks[hvd.rank()], name, op=hvd.Sum)()
        assert_same(result.to_dense(), _dense_sum(ranks))


def check_arguments_that_do_not_fit() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        text = raised(
            NotImplementedError, lambda op=op: hvd.sparse_allreduce_async(_sparse(0), "op", op)
        )
        assert "op=Average or op=Sum only" in text
    dense = raised(ValueError, lambda: hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum))
    assert "use allreduce for dense tensors" in dense
    for collective in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        refused = raised(ValueError, lambda collective=collective: collective(_sparse(0)))
        assert "is not supported" in refused
    hvd.barrier()


def check_a_dtype_that_is_refused_leaves_nothing_begun() -> None:
    ranks = [_sparse(r) for r in range(hvd.size())]
    if hvd.rank() == 0:
        imaginary = ranks[0].to(torch.complex64)
        text = raised(ValueError, lambda: hvd.sparse_allreduce_async(imaginary, "again", hvd.Sum))
        assert "complex64" in text
    result = hvd.sparse_allreduce_async(ranks[hvd.rank()], "again", hvd.Sum)()
    assert_same(result.to_dense(), _dense_sum(ranks))


def check_sizes_that_differ_are_a_mismatch_on_every_rank() -> None:
    size = ROWS if hvd.rank() == 0 else ROWS + 1
    odd = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, WIDTH), (size, WIDTH), check_invariants=True
    )
    text = raised(hvd.HorovodInternalError, hvd.sparse_allreduce_async(odd, "odd_rows", op=hvd.Sum))
    assert "Mismatched ALLREDUCE tensor shapes" in text
    assert f"[{ROWS}, {WIDTH}]" in text and f"[{ROWS + 1}, {WIDTH}]" in text
    width = WIDTH if hvd.rank() == 0 else WIDTH + 1
    odd = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, width), (ROWS, width), check_invariants=True
    )
    raised(hvd.HorovodInternalError, hvd.sparse_allreduce_async(odd, "odd_width", op=hvd.Sum))
    assert_job_usable()


# ---- in the optimizer ---------------------------------------------------------------------------


class _Bag(nn.Module):
    """Two sparse embeddings and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.second = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """One number for each row of words."""
        return self.last(torch.tanh(self.first(words).sum(1) + self.second(words)))


def _words(step: int, rank: int) -> torch.Tensor:
    """Different numbers of different words on each rank; in some steps none on the last one."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = 0 if step % 2 and rank == hvd.size() - 1 else rank + 2
    return torch.randint(0, ROWS, (rows, 2), generator=generator)


def _train(wrap_options: dict[str, Any], make: Any, lr: float = 0.2) -> None:
    """Compare with one rank that adds up (or averages) what all ranks' batches give."""
    torch.manual_seed(5)
    model = _Bag().double()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=lr), model.named_parameters(), **wrap_options
    )
    plain = make(reference.parameters(), lr=lr)
    mean = wrap_options.get("op", hvd.Average) == hvd.Average
    for step in range(4):
        optimizer.zero_grad()
        (model(_words(step, hvd.rank())) ** 2).sum().backward()
        optimizer.step()
        assert model.first.weight.grad.is_sparse and not model.last.weight.grad.is_sparse
        plain.zero_grad()
        loss = sum((reference(_words(step, r)) ** 2).sum() for r in range(hvd.size()))
        (loss / hvd.size() if mean else loss).backward()
        plain.step()
    for (name, mine), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, right, msg=lambda m, n=name: f"{n}: {m}")


def check_training_sparse_embeddings_equals_one_rank() -> None:
    for options in (
        {},
        {"op": hvd.Sum},
        {"sparse_as_dense": True},
        {"gradient_predivide_factor": 2.0},
        {"groups": 1},
        {"groups": 2},
    ):
        _train(options, torch.optim.SGD, lr=0.2 if options.get("op") != hvd.Sum else 0.05)


def check_adagrad_keeps_sparse_gradients() -> None:
    _train({}, torch.optim.Adagrad)


def check_sparse_adam_which_takes_sparse_gradients_only() -> None:
    for as_dense in (False, True):
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        with torch.no_grad():
            model.weight.copy_(torch.arange(1, ROWS * WIDTH + 1).view(ROWS, WIDTH) / 7.0)
        reference = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(model.parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        plain = torch.optim.SparseAdam(list(reference.parameters()), lr=0.1)
        for step in range(3):
            words = [torch.tensor([r, r + step, 9]) for r in range(hvd.size())]
            optimizer.zero_grad()
            (model(words[hvd.rank()]) ** 2).sum().backward()
            optimizer.step()
            plain.zero_grad()
            ((reference(torch.cat(words)) ** 2).sum() / hvd.size()).backward()
            plain.step()
        torch.testing.assert_close(model.weight, reference.weight)


def check_backward_passes_add_up_sparse_gradients() -> None:
    model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=2, op=hvd.Sum
    )
    for part in range(2):
        model(torch.tensor([hvd.rank(), 8 + part, 10])).sum().backward()
    optimizer.synchronize()
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    expected[: hvd.size()] += 2
    expected[8:10] += hvd.size()
    expected[10] += 2 * hvd.size()
    assert_same(model.weight.grad.to_dense(), expected)


def check_compressed_values_come_back_in_their_dtype() -> None:
    for groups, as_dense in ((None, False), (1, False), (None, True), (1, True)):
        model = nn.ModuleList([nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 1)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum, groups=groups,
            compression=hvd.Compression.fp16, sparse_as_dense=as_dense,
        )  # fmt: skip
        words = model[0](torch.tensor([hvd.rank(), ROWS - 1])).sum() * 0.5
        (words + model[1](torch.full((WIDTH,), 1.0 + hvd.rank()))).sum().backward()
        optimizer.synchronize()
        expected = torch.zeros(ROWS, WIDTH)
        expected[: hvd.size()] = 0.5
        expected[ROWS - 1] = 0.5 * hvd.size()
        assert_same(model[0].weight.grad.to_dense(), expected)
        total = float(sum(1 + r for r in range(hvd.size())))
        assert_same(model[1].weight.grad, torch.full((1, WIDTH), total))
        assert_same(model[1].bias.grad, torch.tensor([float(hvd.size())]))


def check_a_layer_that_a_rank_does_not_reach() -> None:
    for as_dense in (False, True):
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum, sparse_as_dense=as_dense
        )
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 or hvd.rank() == 0:  # in the first step by all
                model(torch.tensor([step])).sum().backward()
            optimizer.step()
            expected = torch.zeros(ROWS, WIDTH)
            expected[step] = hvd.size() if step == 0 else 1
            assert model.weight.grad.is_sparse
            assert_same(model.weight.grad.to_dense(), expected)


def check_a_new_rank_of_an_elastic_job_may_lack_a_sparse_gradient_at_once() -> None:
    last = hvd.size() - 1
    for options in ({}, {"sparse_as_dense": True}):
        model = _Bag()

        def state_of(model=model, options=options) -> hvd.elastic.TorchState:
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Sum,
                **options,
            )  # fmt: skip
            return hvd.elastic.TorchState(model, optimizer)

        state = state_of()
        model(_words(0, hvd.rank())).sum().backward()
        state.optimizer.step()
        if hvd.rank() == last:
            state = state_of()  # as of a process that has not trained yet
        state.sync()
        state.optimizer.zero_grad()
        if hvd.rank() != last:
            model.first(torch.tensor([hvd.rank(), last])).sum().backward()
        state.optimizer.step()
        expected = torch.zeros(ROWS, WIDTH)
        expected[:last] += 1
        expected[last] += last
        assert model.first.weight.grad.is_sparse and model.second.weight.grad.is_sparse
        assert_same(model.first.weight.grad.to_dense(), expected)
        assert_same(model.second.weight.grad.to_dense(), torch.zeros(ROWS, WIDTH))
        assert_same(model.last.weight.grad, torch.zeros(1, WIDTH))


def check_the_gradient_stays_the_same_object() -> None:
    model = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        model(torch.tensor([hvd.rank()])).sum().backward()
        before = model.weight.grad
        assert "prohibited as it can cause a race" in raised(AssertionError, optimizer.zero_grad)
        optimizer.step()
        assert model.weight.grad is before
        assert_same(before.to_dense()[0], torch.full((WIDTH,), 1.0 / hvd.size()))
        optimizer.zero_grad(set_to_none=False)


def check_other_ops_refuse_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Max)
    text = raised(NotImplementedError, lambda: model(torch.tensor([1])).sum().backward())
    assert "sparse_as_dense=True" in text
    optimizer.zero_grad()
    assert_job_usable()


# ---- NaN ----------------------------------------------------------------------------------------


class _Search:
    """Training in whose second step the last rank has a NaN in a sparse gradient."""

    def __init__(self, action: str, **options: Any) -> None:
        torch.manual_seed(5)
        self.action = action
        self.model = _Bag()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1), self.model.named_parameters(),
            **options,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Step 1 is the bad one; looks at what every rank learns and does."""
        bad = number == 1
        self.optimizer.zero_grad()
        loss = self.model(torch.tensor([[number, 2], [2, hvd.rank()]])).sum()
        if bad and hvd.rank() == hvd.size() - 1:
            loss = loss + self.model.first(torch.tensor([4]))[0, 1] * float("nan")
        before = [p.detach().clone() for p in self.model.parameters()]
        with stderr_lines() as lines:
            loss.backward()
            if bad and self.action == "raise":
                told = [raised(NanGradientError, self.optimizer.step)]
            else:
                self.optimizer.step()
        if not (bad and self.action == "raise"):
            told = [line for line in lines if "[nancheck]" in line]
        where = f"first.weight.values on rank {hvd.size() - 1}"
        assert any(where in line for line in told) if bad else not told, (number, told)
        same = [torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True)]
        assert not any(same) if not bad or self.action == "report" else all(same), (number, same)


def check_nan_in_a_sparse_gradient_is_known_to_all_ranks_in_its_step() -> None:
    for action in ("report", "raise", "skip"):
        with world_with(**nan_check(action)):
            for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}):
                search = _Search(action, **options)
                for number in range(2 if action == "report" else 3):
                    search.step(number)
                nans = [bool(p.isnan().any()) for p in search.model.parameters()]
                assert nans == [action == "report", False, False, False]


def check_nan_in_sparse_tensors_that_are_no_gradients_is_nobodys_business() -> None:
    with world_with(**nan_check("raise")):
        mine = _sparse(hvd.rank()) * float("nan" if hvd.rank() == 0 else "1")
        assert hvd.sparse_allreduce_async(mine, "metric", hvd.Sum)().to_dense().isnan().any()
