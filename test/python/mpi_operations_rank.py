"""One rank of test_mpi_operations: compares collectives of all kinds with NumPy's results."""

from __future__ import annotations

import sys

import numpy as np
import torch

import perseus
import perseus.torch as hvd

SIZES = (1, 7, 4099, 300_001)
# Three rounds of 16 MiB, the last one short.
LARGE = 9_000_011
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that differ per rank and index, and whose sums are exact in every dtype."""
    period = ((torch.arange(5) * 7 + rank * 3) % 5 + (rank + 1) % 3).to(dtype)
    return period.repeat(count // 5 + 1)[:count]


def of_all(count: int, dtype: torch.dtype) -> np.ndarray:
    return torch.stack([values(r, count, dtype) for r in range(hvd.size())]).double().numpy()


def check(name: str, found: torch.Tensor, expected: np.ndarray) -> None:
    got = found.double().numpy()
    assert got.shape == expected.shape, (name, got.shape, expected.shape)
    assert np.array_equal(got, expected), (name, np.flatnonzero(got != expected)[:5])


def allreduces() -> None:
    reductions = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for dtype in (*INTEGERS, *FLOATS):
        for count in SIZES:
            mine, everybodys = values(hvd.rank(), count, dtype), of_all(count, dtype)
            # What is long differs from what is short in its rounds alone.
            for op, reduce in list(reductions.items())[: 1 if count == SIZES[-1] else None]:
                name = f"{dtype} {count} {op}"
                check(name, hvd.allreduce(mine, op=op, name=name), reduce(everybodys, axis=0))
    for dtype in (torch.float32, torch.float64):
        mine, everybodys = values(hvd.rank(), 4099, dtype), of_all(4099, dtype)
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2, postscale_factor=0.5)
        check(f"scaled {dtype}", scaled, everybodys.sum(axis=0))
    integers = hvd.allreduce(values(hvd.rank(), 99, torch.int32), op=hvd.Average)
    check("integer average", integers, np.trunc(of_all(99, torch.int32).mean(axis=0)))
    nan = torch.tensor([1.0, float("nan")]) if hvd.rank() == 1 else torch.tensor([2.0, 2.0])
    least = hvd.allreduce(nan, op=hvd.Min, name="nan")
    assert least[0] == 1 and torch.isnan(least[1]), least
    large = hvd.allreduce(values(hvd.rank(), LARGE, torch.float32), op=hvd.Sum, name="large")
    check("large", large, of_all(LARGE, torch.float32).sum(axis=0))
    many = [values(hvd.rank(), 100 + i, torch.float32) for i in range(40)]
    handles = [hvd.allreduce_async(each, op=hvd.Sum, name=f"m{i}") for i, each in enumerate(many)]
    for i, handle in enumerate(handles):
        check(f"many {i}", hvd.synchronize(handle), of_all(100 + i, torch.float32).sum(axis=0))


def others() -> None:
    rank, size = hvd.rank(), hvd.size()
    for count in (*SIZES, LARGE):
        root = count % size
        check(
            f"broadcast {count}",
            hvd.broadcast(values(rank, count, torch.float32), root, name=f"b{count}"),
            values(root, count, torch.float32).double().numpy(),
        )
    for rows in (0, 1, 1000, 1_500_007):
        sent = values(rank, (rows + rank) * 3, torch.float32).reshape(-1, 3)
        expected = [values(r, (rows + r) * 3, torch.float32).reshape(-1, 3) for r in range(size)]
        gathered = hvd.allgather(sent, name=f"g{rows}")
        check(f"allgather {rows}", gathered, torch.cat(expected).double().numpy())
    for rows in (0, 5, 1_400_003):
        splits = torch.tensor([rows + rank + 2 * to for to in range(size)], dtype=torch.int32)
        sent = values(rank, int(splits.sum()) * 2, torch.float32).reshape(-1, 2)
        received, counts = hvd.alltoall(sent, splits, name=f"a{rows}")
        assert counts.tolist() == [rows + r + 2 * rank for r in range(size)], counts
        expected = []
        for r in range(size):
            theirs = [rows + r + 2 * to for to in range(size)]
            begin = sum(theirs[:rank])
            whole = values(r, sum(theirs) * 2, torch.float32).reshape(-1, 2)
            expected.append(whole[begin : begin + theirs[rank]])
        check(f"alltoall {rows}", received, torch.cat(expected).double().numpy())
    for rows in (1, 11, 2_000_003):
        mine = values(rank, rows * 3, torch.float32).reshape(-1, 3)
        part = hvd.reducescatter(mine, op=hvd.Sum, name=f"r{rows}")
        share = [rows // size + (r < rows % size) for r in range(size)]
        begin = sum(share[:rank])
        whole = of_all(rows * 3, torch.float32).sum(axis=0).reshape(-1, 3)
        check(f"reducescatter {rows}", part, whole[begin : begin + share[rank]])
    same = hvd.allreduce(torch.full((99,), 2.0), op=hvd.Adasum, name="adasum")
    check("adasum", same, np.full(99, 2.0))


def schedules() -> None:
    """The same step again and again, which PERSEUS_OFFLINE_NEG freezes."""
    for step in range(12):
        handles = [
            hvd.allreduce_async(
                values(hvd.rank() + step, 1000 + i, torch.float32), op=hvd.Sum, name=f"s{i}"
            )
            for i in range(8)
        ]
        for i, handle in enumerate(handles):
            everybodys = [values(r + step, 1000 + i, torch.float32) for r in range(hvd.size())]
            check(
                f"step {step} {i}",
                hvd.synchronize(handle),
                torch.stack(everybodys).double().numpy().sum(axis=0),
            )
        if step == 9:  # leaves the schedule
            hvd.allreduce(torch.ones(3), name="once")


def process_set() -> None:
    pair = hvd.add_process_set([0, hvd.size() - 1])
    if pair.included():
        total = hvd.allreduce(torch.full((5,), hvd.rank() + 1.0), op=hvd.Sum, process_set=pair)
        check("process set", total, np.full(5, 1.0 + hvd.size()))
    hvd.remove_process_set(pair)


def main() -> None:
    hvd.init(process_sets="dynamic")
    before = perseus.stats()
    allreduces()
    others()
    schedules()
    process_set()
    after = perseus.stats()
    own = sum(
        after[name] - before[name] for name in ("shm_bytes_sent", "tcp_bytes_sent") if name in after
    )
    print(f"rank {hvd.rank()} of {hvd.size()} sent {own} bytes itself", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
