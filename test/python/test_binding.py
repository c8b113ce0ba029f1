"""perseus._core itself: ranks as threads of one process, handles, layouts, lifetimes."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from perseus import _core, errors
from perseus.torch.session import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    Average,
    Sum,
    describe,
    wrap,
)


class Rank:
    """One rank of a world in memory."""

    def __init__(self, rank: int, size: int, world: str, **options: Any) -> None:
        self.context = _core.Context(rank=rank, size=size, memory_world=world)
        self.operations = _core.Operations(self.context, wrap, options.get("describe", describe))

    def submit(self, kind: int, name: Any, tensor: Any, output: Any = None, **options: Any) -> int:
        return self.operations.submit(kind, name, tensor, output, **{"op": Sum, **options})

    def reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.operations.synchronize(
            self.submit(ALLREDUCE, name, tensor, torch.empty_like(tensor))
        )

    def close(self) -> None:
        self.context.shutdown()
        self.operations.close()
        self.context.close()


def in_threads(size: int, body: Callable[[Rank], Any], **options: Any) -> list[Any]:
    """body(rank) on every rank of a new world, each in a thread; results in rank order."""
    world = uuid.uuid4().hex
    barrier = threading.Barrier(size)

    def run(index: int) -> Any:
        rank = Rank(index, size, world, **options)
        try:
            return body(rank)
        finally:
            barrier.wait(60)
            rank.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size), timeout=60))


def test_threads_reduce_gather_and_exchange():
    def body(rank: Rank) -> None:
        index, size = rank.context.rank, rank.context.size
        total = rank.reduce("t", torch.arange(5.0) * (index + 1))
        assert total.tolist() == [i * 6.0 for i in range(5)]
        gathered = rank.operations.synchronize(
            rank.submit(ALLGATHER, "g", torch.full((index, 2), index))
        )
        assert gathered.tolist() == [[1, 1], [2, 2], [2, 2]]
        rows, received = rank.operations.synchronize(
            rank.submit(
                ALLTOALL,
                "a",
                torch.tensor([10 * index + d for d in range(size)]),
                splits=[1] * size,
            )
        )
        assert rows.tolist() == [10 * r + index for r in range(size)]
        assert received.tolist() == [1] * size and received.dtype == torch.int32
        assert rank.operations.synchronize(rank.submit(BARRIER, "b", None)) is None

    in_threads(3, body)


def test_averages_of_equal_integers_are_exact():
    # 49 * (1 / 49) is less than 1 in double precision.
    def body(rank: Rank) -> list[int]:
        ones = torch.tensor([1, 7, -3])
        handle = rank.submit(ALLREDUCE, "ones", ones, torch.empty_like(ones), op=Average)
        return rank.operations.synchronize(handle).tolist()

    assert in_threads(49, body) == [[1, 7, -3]] * 49


def test_a_type_without_dlpacks_table_is_described_by_the_adapter():
    class Old:
        """Like a tensor of a PyTorch that has no exchange table."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    seen = []

    def describe_old(old: Old) -> tuple[Any, ...]:
        seen.append(old)
        return describe(old.tensor)

    def body(rank: Rank) -> None:
        old = Old(torch.full((2, 3), 1.0 + rank.context.rank).t())
        assert rank.operations.synchronize(rank.submit(ALLREDUCE, "old", old, old)) is old
        assert old.tensor.tolist() == [[3.0, 3.0]] * 3

    in_threads(2, body, describe=describe_old)
    assert len(seen) == 2


def test_dlpacks_table_and_the_description_agree(single):
    # describe must not be asked for what the table can tell.
    rank = Rank(0, 1, uuid.uuid4().hex, describe=None)
    for tensor in (
        torch.arange(6.0).reshape(2, 3)[1:],
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        before = tensor.detach().clone()
        assert rank.operations.synchronize(rank.submit(BROADCAST, None, tensor, tensor)) is tensor
        assert torch.equal(tensor, before)
    rank.close()


@pytest.fixture
def single():
    rank = Rank(0, 1, uuid.uuid4().hex)
    yield rank
    rank.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), "Tensor type torch.complex64 is not supported."),
        (torch.ones(2, 2).to_sparse(), "Tensor type torch.sparse_coo is not supported."),
        (torch.empty(2, device="meta"), "expected host memory"),
        (torch.ones(4)[::2], "Tensor is required to be contiguous."),
        (torch.ones(1).expand(3), "Tensor is required to be contiguous."),
        (torch.ones(4, 4)[:, :2], "Tensor is required to be contiguous."),
    ],
)
def test_tensors_that_cannot_be_served(single, tensor, message):
    with pytest.raises(ValueError, match=message):
        single.submit(ALLREDUCE, "x", tensor, tensor)
    assert single.operations.open_handles() == 0


def test_what_is_no_tensor(single):
    for thing in (5, None.__class__, [1.0]):
        with pytest.raises(TypeError, match="expected a tensor"):
            single.submit(ALLREDUCE, "x", thing, thing)


@pytest.mark.parametrize("kind", [ALLGATHER, ALLTOALL])
def test_rows_must_be_slowest_where_they_are_cut(single, kind):
    with pytest.raises(ValueError, match="required to be contiguous"):
        single.submit(kind, "x", torch.ones(2, 3).t())


def flat(count: int) -> torch.Tensor:
    return torch.arange(float(count))


@pytest.mark.parametrize("kind", [ALLREDUCE, BROADCAST])
@pytest.mark.parametrize(
    ("tensor", "output"),
    [
        (flat(8), torch.zeros(2)),
        (flat(6), torch.zeros(2, 3)),
        (flat(6).view(2, 3), torch.zeros(3, 2)),
        (flat(4).view(2, 2), torch.zeros(2, 2).t()),
        (flat(54).view(2, 3, 3, 3), torch.zeros(2, 3, 3, 3).to(memory_format=torch.channels_last)),
    ],
)
def test_an_output_that_is_not_like_the_input_is_refused(single, kind, tensor, output):
    before = output.clone()
    for given in ((tensor, output), ((flat(1), tensor), (flat(1), output))):
        with pytest.raises(ValueError, match=r"differ in shape or memory order.*empty_like"):
            single.submit(kind, "x", *given)
    assert torch.equal(output, before) and single.operations.open_handles() == 0


@pytest.mark.parametrize("kind", [ALLREDUCE, BROADCAST])
def test_an_output_in_a_part_of_the_input_is_refused(single, kind):
    memory = flat(8)
    for given, output in ((memory[:6], memory[2:]), (memory[2:], memory[:6])):
        with pytest.raises(ValueError, match="or overlap: pass an output"):
            single.submit(kind, "x", given, output)
    assert torch.equal(memory, flat(8))
    # Beside it and in all of it there is room.
    assert single.operations.synchronize(
        single.submit(kind, "beside", memory[:4], memory[4:])
    ).tolist() == [0, 1, 2, 3]
    single.operations.synchronize(single.submit(kind, "same", memory[:4], memory[:4].view(4)))
    assert memory.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def in_order(order: tuple[int, ...], rank: int) -> torch.Tensor:
    """A tensor of 3 x 3 x 3 whose dimensions lie in this order in memory; ranks' values differ."""
    tensor = torch.empty(3, 3, 3).permute(order)
    return torch.empty_like(tensor).copy_(flat(27).view(3, 3, 3) + rank)


@pytest.mark.parametrize("kind", [ALLREDUCE, BROADCAST])
@pytest.mark.parametrize("orders", [[(0, 1, 2), (2, 1, 0)], [(1, 2, 0), (2, 0, 1)]])
def test_ranks_with_other_memory_layouts_are_a_mismatch(kind, orders):
    def body(rank: Rank) -> None:
        index = rank.context.rank
        own = in_order(orders[index], index)
        # In a group it matters which tensor lies how.
        pair = (own, in_order(orders[1 - index], index))
        for name, given in (("one", own), ("pair", pair)):
            with pytest.raises(errors.MismatchError, match=r"memory layouts.*one memory format"):
                rank.operations.synchronize(rank.submit(kind, name, given, given))
        assert torch.equal(own, in_order((0, 1, 2), index))
        alike = in_order(orders[0], index)
        rank.operations.synchronize(rank.submit(kind, "one", alike, alike))
        expected = 2 * flat(27) + 1 if kind == ALLREDUCE else flat(27)
        assert torch.equal(alike, expected.view(3, 3, 3))

    in_threads(2, body)


def test_extents_of_one_may_have_any_stride(single):
    tensor = torch.arange(3.0).as_strided((1, 3, 1), (77, 1, 5))
    assert single.reduce("odd", tensor).tolist() == [[[0.0], [1.0], [2.0]]]


@pytest.mark.parametrize("layout", [7, (1 << 64) - 1, (5 << 64) | 7, (1 << 128) - 2])
def test_a_residual_keeps_its_layout_with_the_shapes_above_it(single, layout):
    data = torch.arange(8, dtype=torch.float32).numpy().tobytes()
    single.context.write_residual(1, 0, "g", False, layout, data)
    assert single.context.read_residual(1, 0, "g", False) == (layout, data)


def test_names(single):
    with pytest.raises(ValueError, match="NUL"):
        single.submit(ALLREDUCE, "a\0b", torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError):
        single.submit(ALLREDUCE, 7, torch.ones(1), torch.ones(1))
    for name in ("x" * 1000, "ünï/cödé", ""):
        assert single.reduce(name, torch.ones(1)).item() == 1.0


def test_arguments_of_the_wrong_kind(single):
    with pytest.raises(TypeError, match="3 or 4 positional arguments, got 2"):
        single.operations.submit(ALLREDUCE, "x")
    with pytest.raises(TypeError, match="3 or 4 positional arguments, got 5"):
        single.operations.submit(ALLREDUCE, "x", torch.ones(1), torch.ones(1), Sum)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        single.submit(ALLREDUCE, "x", torch.ones(1), torch.ones(1), scale=2.0)
    with pytest.raises(ValueError, match="unknown kind"):
        single.submit(99, "x", torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="as many outputs"):
        single.submit(ALLREDUCE, "x", (torch.ones(1), torch.ones(1)), (torch.ones(1),))
    with pytest.raises(TypeError):
        _core.Operations("no context", wrap)


def test_handles_count_up_and_are_forgotten(single):
    first = single.submit(ALLREDUCE, "a", torch.ones(1), torch.ones(1))
    second = single.submit(ALLREDUCE, "b", torch.ones(1), torch.ones(1))
    assert second == first + 1 and single.operations.open_handles() == 2
    single.operations.synchronize(second)
    assert single.operations.synchronize(second) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        single.operations.poll(second)
    assert single.operations.poll(first) in (True, False)
    single.operations.synchronize(first)
    assert single.operations.open_handles() == 0
    later = _core.Operations(single.context, wrap, describe, last_handle=first + 40)
    tensor = torch.ones(1)
    assert later.submit(ALLREDUCE, "c", tensor, tensor) == first + 41
    assert later.synchronize(first + 41) is tensor


def test_thousands_of_open_handles_in_any_order(single):
    tensors = [torch.tensor([float(i)]) for i in range(5000)]
    handles = [single.submit(ALLREDUCE, f"n{i}", t, t) for i, t in enumerate(tensors)]
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(3)).tolist()
    for i in order:
        assert single.operations.synchronize(handles[i]) is tensors[i]
        assert tensors[i].item() == float(i)
    assert single.operations.open_handles() == 0


def test_tensors_live_until_synchronised(single):
    tensor = torch.ones(10)
    references = sys.getrefcount(tensor)
    handle = single.submit(ALLREDUCE, "kept", tensor, tensor)
    assert sys.getrefcount(tensor) == references + 2  # as input and as output
    single.operations.synchronize(handle)
    assert sys.getrefcount(tensor) == references


def test_a_refused_submission_keeps_no_reference(single):
    tensor = torch.ones(4)[::2]
    references = sys.getrefcount(tensor)
    with pytest.raises(ValueError, match="contiguous"):
        single.submit(ALLREDUCE, "refused", tensor, tensor)
    assert sys.getrefcount(tensor) == references


def test_gathered_memory_belongs_to_the_tensor(single):
    before = torch.arange(1000.0)
    gathered = single.operations.synchronize(single.submit(ALLGATHER, "mine", before))
    single.close()
    gc.collect()
    gathered += 1.0
    assert torch.equal(gathered, before + 1.0)


@pytest.mark.parametrize("rows", [[3, 3], [3, 2], [0, 0]])
def test_gathered_memory_is_the_callers_if_ranks_have_the_same_size(rows):
    def body(rank: Rank) -> None:
        index = rank.context.rank
        place = torch.full((2 * rows[index], 2), -1.0)
        handle = rank.submit(ALLGATHER, "g", torch.full((rows[index], 2), index + 1.0), place)
        gathered = rank.operations.synchronize(handle)
        expected = torch.cat([torch.full((rows[i], 2), i + 1.0) for i in range(2)])
        assert torch.equal(gathered, expected)
        assert (gathered is place) == (rows == [3, 3])
        if rows == [3, 2]:
            assert (place == -1).all()

    in_threads(2, body)


def test_operations_that_go_away_with_open_handles_close_their_context():
    rank = Rank(0, 1, uuid.uuid4().hex)
    tensor = torch.ones(3)
    references = sys.getrefcount(tensor)
    rank.submit(ALLREDUCE, "open", tensor, tensor)
    context = rank.context
    del rank.operations
    gc.collect()
    assert context.closed and sys.getrefcount(tensor) == references


def test_outcomes_are_kept_when_closing():
    def body(rank: Rank) -> tuple[Any, ...]:
        done = rank.submit(ALLREDUCE, "done", torch.ones(2), torch.empty(2))
        gathered = rank.submit(ALLGATHER, "gathered", torch.ones(1))
        rank.operations.synchronize(rank.submit(BARRIER, "b", None))
        left = None
        if rank.context.rank == 0:
            left = rank.submit(ALLREDUCE, "left", torch.ones(2), torch.empty(2))
        return rank, done, gathered, left

    results = in_threads(2, body)
    for rank, done, gathered, left in results:
        assert rank.operations.synchronize(done).tolist() == [2.0, 2.0]
        assert rank.operations.synchronize(gathered).tolist() == [1.0, 1.0]
        if left is not None:
            with pytest.raises(errors.AbortedError, match="Horovod has been shut down"):
                rank.operations.synchronize(left)
        with pytest.raises(errors.AbortedError, match="Horovod has been shut down"):
            rank.submit(ALLREDUCE, "late", torch.ones(1), torch.ones(1))


def until_it_waits(rank: Rank, sleeps: int) -> None:
    """Until a thread sleeps in a wait of this rank, which has counted so many sleeps before."""
    deadline = time.monotonic() + 60
    while rank.context.stats()["sleeps"] == sleeps:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_wait_does_not_hold_the_interpreter():
    ticks = []
    waits: queue.Queue[tuple[Rank, int]] = queue.Queue()

    def body(rank: Rank) -> None:
        if rank.context.rank == 0:
            handle = rank.submit(ALLREDUCE, "slow", torch.ones(1), torch.empty(1))
            ticks.append(time.monotonic())
            waits.put((rank, rank.context.stats()["sleeps"]))
            rank.operations.synchronize(handle)
            ticks.append(time.monotonic())
        else:
            until_it_waits(*waits.get(timeout=60))  # this Python thread gets on meanwhile
            ticks.append(time.monotonic())
            rank.reduce("slow", torch.ones(1))

    in_threads(2, body)
    assert ticks[0] < ticks[1] < ticks[2]


def test_a_wait_with_a_limit_says_whether_the_operation_has_ended():
    late = threading.Event()

    def body(rank: Rank) -> None:
        if rank.context.rank == 0:
            handle = rank.submit(ALLREDUCE, "slow", torch.ones(1), torch.empty(1))
            for seconds in (-1.0, 0.0, 0.05):
                begun = time.monotonic()
                assert rank.operations.wait(handle, seconds) is False
                assert time.monotonic() - begun >= seconds
            late.set()
            assert rank.operations.wait(handle, 60.0) is True
            assert rank.operations.synchronize(handle).tolist() == [3.0]
            assert rank.operations.wait(handle, 60.0) is True  # it is forgotten
            with pytest.raises(TypeError, match="a handle and seconds"):
                rank.operations.wait(handle)
        else:
            assert late.wait(60)
            rank.reduce("slow", torch.full((1,), 2.0))

    in_threads(2, body)


def test_closing_ends_another_threads_wait():
    world = uuid.uuid4().hex
    with ThreadPoolExecutor(3) as pool:
        first, second = pool.map(lambda i: Rank(i, 2, world), range(2))
        handle = first.submit(ALLREDUCE, "never", torch.ones(1), torch.empty(1))
        sleeps = first.context.stats()["sleeps"]
        waiting = pool.submit(first.operations.synchronize, handle)
        limited = pool.submit(first.operations.wait, handle, 60.0)
        until_it_waits(first, sleeps)
        assert not waiting.done()
        first.close()
        with pytest.raises(errors.AbortedError):
            waiting.result(timeout=60)
        assert limited.result(timeout=30) is True
        second.close()


def test_closing_waits_for_another_threads_submission_and_result():
    begun, rank = threading.Event(), None

    def until_closed() -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while not rank.context.closed:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wrap_late(*arguments: Any) -> Any:
        until_closed()
        return wrap(*arguments)

    def describe_late(tensor: torch.Tensor) -> tuple[Any, ...]:
        until_closed()
        return describe(tensor)

    class Old:
        """Is described, as it has no exchange table."""

    def gather() -> Any:
        handle = rank.submit(ALLGATHER, "g", torch.arange(3.0))
        return rank.operations.synchronize(handle)

    with ThreadPoolExecutor(1) as pool:
        rank = Rank(0, 1, uuid.uuid4().hex)
        rank.operations = _core.Operations(rank.context, wrap_late, describe)
        result = pool.submit(gather)
        assert begun.wait(60)
        rank.close()
        assert result.result(timeout=60).tolist() == [0, 1, 2]

        begun.clear()
        rank = Rank(0, 1, uuid.uuid4().hex, describe=lambda _: describe_late(torch.ones(3)))
        refused = pool.submit(rank.submit, ALLREDUCE, "r", Old(), Old())
        assert begun.wait(60)
        rank.close()
        with pytest.raises(errors.AbortedError, match="has been shut down"):
            refused.result(timeout=60)
        assert rank.operations.open_handles() == 0


def test_what_runs_in_a_submission_or_for_a_result_may_close_the_context():
    rank = Rank(0, 1, uuid.uuid4().hex, describe=lambda _: rank.close() or describe(torch.ones(3)))
    with pytest.raises(errors.AbortedError, match="has been shut down"):
        rank.submit(ALLREDUCE, "r", object(), object())
    rank = Rank(0, 1, uuid.uuid4().hex)
    rank.operations = _core.Operations(
        rank.context, lambda *arguments: rank.close() or wrap(*arguments), describe
    )
    result = rank.operations.synchronize(rank.submit(ALLGATHER, "g", torch.arange(3.0)))
    assert result.tolist() == [0, 1, 2]


def test_an_outcome_that_is_being_kept_is_waited_for():
    begun, collecting = threading.Event(), threading.Event()

    def wrap_late(*arguments: Any) -> Any:
        begun.set()
        collecting.wait(60)
        time.sleep(0.05)
        return wrap(*arguments)

    rank = Rank(0, 1, uuid.uuid4().hex)
    rank.operations = _core.Operations(rank.context, wrap_late, describe)
    handle = rank.submit(ALLGATHER, "g", torch.arange(3.0))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(rank.close)
        assert begun.wait(60)
        collecting.set()
        assert rank.operations.synchronize(handle).tolist() == [0, 1, 2]
        closing.result(timeout=60)


def test_handles_of_a_context_that_is_closed_without_them():
    rank = Rank(0, 1, uuid.uuid4().hex)
    handle = rank.submit(ALLREDUCE, "a", torch.ones(1), torch.ones(1))
    rank.context.close()
    assert rank.operations.poll(handle) is True
    with pytest.raises(errors.AbortedError, match="Horovod has been shut down"):
        rank.operations.synchronize(handle)
    with pytest.raises(errors.AbortedError, match="Horovod has been shut down"):
        rank.context.abort("too late")


def test_contexts_answer_what_they_are_asked(single):
    context = single.context
    assert (context.rank, context.size, context.local_rank, context.local_size) == (0, 1, 0, 1)
    assert context.failure() is None
    assert context.group_ranks(0) == [0]
    assert context.group_ranks(12345) is None
    single.close()
    with pytest.raises(errors.AbortedError, match="Horovod has been shut down"):
        context.stats()


def test_a_cause_of_many_bytes_arrives_as_a_text_of_whole_characters():
    def body(rank: Rank) -> str | None:
        if rank.context.rank == 0:
            rank.context.abort(reason)
        with pytest.raises(errors.AbortedError):
            rank.reduce("t", torch.ones(1))
        return rank.context.failure()

    for shift in range(4):
        reason = "." * shift + "\N{GRINNING FACE}" * 300
        here, there = in_threads(2, body)
        assert here.endswith(reason)
        assert here.startswith(there)
        assert 996 < len(there.encode()) <= 1000
    reason = b"\xff"  # of no character
    assert [text[-1] for text in in_threads(2, body)] == ["\N{REPLACEMENT CHARACTER}"] * 2


def test_messages_speak_in_terms_of_the_api_that_was_asked_for():
    context = _core.Context(rank=0, size=1, api=1)
    context.close()
    with pytest.raises(errors.AbortedError, match="process group has been destroyed"):
        context.stats()
    with pytest.raises(ValueError, match=r"perseus_context_options.api: expected a perseus_api"):
        _core.Context(rank=0, size=1, api=2)


def test_a_store_server_gets_a_free_port_and_gives_it_back():
    first = _core.StoreServer("127.0.0.1", 0, False, b"s" * 32)
    with pytest.raises(errors.TransportError, match=str(first.port)):
        _core.StoreServer("127.0.0.1", first.port, False, b"s" * 32)
    second = _core.StoreServer("127.0.0.1", first.port, True, b"s" * 32)
    assert second.port > first.port
    port = first.port
    first.close()
    again = _core.StoreServer("127.0.0.1", port, False, b"s" * 32)
    assert again.port == port
    again.close()
    second.close()


def test_what_the_caller_raises_ends_the_wait_for_other_ranks() -> None:
    server = _core.StoreServer("127.0.0.1", 0, False, b"s" * 32)
    asked: list[float] = []

    def interrupted() -> None:
        asked.append(time.monotonic())
        if len(asked) == 5:
            raise LookupError("there is no rank 1")

    with pytest.raises(LookupError, match="there is no rank 1"):
        _core.Context(
            rank=0,
            size=2,
            store_host="127.0.0.1",
            store_port=server.port,
            secret=b"s" * 32,
            interrupted=interrupted,
        )
    assert len(asked) == 5
    assert asked[-1] - asked[0] < 20
