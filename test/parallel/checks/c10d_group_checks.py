"""torch.distributed on the backend "perseus": works, futures, and the life of groups."""

from __future__ import annotations

import datetime
import functools
import gc
import inspect
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, everyone, raised, shared_folder
from process_groups import mine, of, process_group
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import perseus.torch.horovod as hvd
from perseus.torch.distributed import backend


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


def check_a_future_can_be_had_while_another_thread_waits() -> None:
    with process_group():
        tensor = mine((9,), torch.float32)
        if hvd.rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            waiting = threading.Thread(target=work.wait)
            waiting.start()
            while waiting.is_alive() and not work._lock.locked():
                time.sleep(0.01)
            future = work.get_future()
            assert not future.done()
            hvd.barrier()
            waiting.join()
            future.wait()
        else:
            hvd.barrier()
            dist.all_reduce(tensor)
        assert_same(tensor, everyone((9,), torch.float32).sum(0).to(torch.float32))


def check_tensors_of_inference_mode() -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = [1] * size
    with process_group():

        def started() -> list[tuple[dist.Work, list[torch.Tensor], list[torch.Tensor]]]:
            """Works, with what they write and what that is to be."""
            bit, bits = torch.full((3,), 1 << rank), torch.full((3,), (1 << size) - 1)
            own, parts = torch.full((size,), 1 << rank), torch.full((1,), 0)
            every = [torch.empty(3, dtype=torch.int64) for _ in range(size)]
            taken = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
            sparse = torch.full((3,), rank + 1.0).to_sparse()
            total = torch.full((3,), size * (size + 1) / 2)
            gathered = dist.all_gather(every, bit.clone(), async_op=True)
            reduced = dist.all_reduce(bit, dist.ReduceOp.BOR, async_op=True)
            scattered = dist.reduce_scatter_tensor(parts, own, dist.ReduceOp.BOR, async_op=True)
            exchanged = dist.all_to_all(taken, list(own.split(splits)), async_op=True)
            summed = dist.all_reduce(sparse, async_op=True)
            single = [torch.full((1,), 1 << other) for other in range(size)]
            return [
                (gathered, every, [torch.full((3,), 1 << other) for other in range(size)]),
                (reduced, [bit], [bits]),
                (scattered, [parts], [bits[:1]]),
                (exchanged, taken, single),
                (summed, [sparse], [total.to_sparse()]),
            ]

        for inside in (True, False):
            with torch.inference_mode():
                works = started()
                if inside:
                    for work, _, _ in works:
                        work.get_future().wait()
            for work, written, wanted in works:
                work.wait()
                for ours, expected in zip(written, wanted, strict=True):
                    assert_same(ours.to_dense(), expected.to_dense())
        for work, written, _ in started():
            with torch.inference_mode():
                work.wait()
            for tensor in written:
                assert not tensor.is_inference()
                values = tensor.coalesce().values() if tensor.is_sparse else tensor
                (values * torch.ones(1, requires_grad=True)).sum().backward()
        leaf = torch.full((3,), rank + 1.0).to_sparse().requires_grad_()
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert_same(leaf.detach().to_dense(), torch.full((3,), size * (size + 1) / 2))


def check_a_group_has_its_store() -> None:
    with process_group():
        store = dist.group.WORLD.get_group_store()
        store.set(f"rank {hvd.rank()}", "is here")
        store.wait([f"rank {rank}" for rank in range(hvd.size())])
        dist.barrier()


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


def check_a_profiler_sees_collectives() -> None:
    with process_group():
        tensor = mine((9,), torch.float32)
        outputs = [torch.empty(9) for _ in range(hvd.size())]
        with torch.profiler.profile() as profile:
            dist.all_gather(outputs, tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            dist.broadcast(tensor, 0)
            dist.barrier()
        seen = {event.key: event.count for event in profile.key_averages()}
        for name in ("allgather", "allreduce", "broadcast", "barrier"):
            # From torch 2.14 on, they pass its dispatcher, or their ranges would be there twice.
            label = name if name == "barrier" else f"{name}_"
            label = f"c10d::{label}" if backend.IS_BACKEND else f"perseus:{name}"
            assert seen.get(label) == 1, seen


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
            assert "Rank" in raised(RuntimeError, barrier)
        group.barrier().wait()
        if hvd.rank() != 0:  # too late
            assert "failed to pass monitoredBarrier in 1000 ms" in raised(RuntimeError, barrier)
        options.timeout = datetime.timedelta(seconds=30)
        group.monitored_barrier(options)
        group.shutdown()


def check_monitored_barriers_name_a_missing_rank_0() -> None:
    with process_group():
        limit = datetime.timedelta(seconds=0.5)
        if hvd.rank() != 0:
            text = raised(RuntimeError, functools.partial(dist.monitored_barrier, None, limit))
            assert "[torch] Rank 0 failed to pass monitoredBarrier in 500 ms" in text
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
        named = f"Rank{'s' if size > 2 else ''} {', '.join(map(str, missing))} failed to pass"
        limit = datetime.timedelta(seconds=1)
        for group in (None, dist.new_group(timeout=datetime.timedelta(seconds=30))):
            barrier = functools.partial(dist.monitored_barrier, group, limit)
            if rank not in missing:
                assert f"{named} monitoredBarrier in 1000 ms" in raised(RuntimeError, barrier)
            dist.barrier()
            if rank in missing:  # too late
                assert f"{named} monitoredBarrier in 1000 ms" in raised(RuntimeError, barrier)
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
            # gloo's binding takes the limit itself.
            raised(RuntimeError, functools.partial(own.monitored_barrier, limit))
        dist.barrier()


def check_a_timeout_of_a_call_limits_its_wait() -> None:
    limit = datetime.timedelta(seconds=0.2)
    calls: list[Callable[[], object]] = [
        lambda: dist.group.WORLD.barrier(timeout=limit).wait(),
    ]
    if not backend.IS_BACKEND:  # torch 2.14 and later hide it from backends in Python
        sums = dist.ReduceOp.SUM
        calls.append(lambda: dist.group.WORLD.allreduce(torch.ones(3), sums, limit).wait())
    if "timeout" in inspect.signature(dist.barrier).parameters:  # torch 2.13
        calls.append(lambda: dist.barrier(timeout=limit))
    with process_group():
        for call in calls:
            if hvd.rank() == 0:
                text = raised(dist.DistBackendError, call)
                assert "did not end within 0.2 s (timeout=)" in text, text
            hvd.barrier()
            if hvd.rank() != 0:
                call()
            dist.barrier()
