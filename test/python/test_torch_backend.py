"""The backend of torch.distributed in one process: how torch finds it, and who is missing."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from importlib.metadata import entry_points
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.distributed
from perseus import basics
from perseus.errors import InitializationError
from perseus.torch import session
from perseus.torch.distributed import backend, launched, world
from perseus.torch.distributed.completer import Completer

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_BESIDE_OTHERS = pytest.mark.skipif(
    _VERSION < (2, 14), reason="torch before 2.14 calls a backend in Python past all that watches"
)


def test_torch_finds_the_backend_by_its_entry_point():
    (found,) = [e for e in entry_points(group="torch.distributed.backends") if e.name == "perseus"]
    found.load()()
    assert dist.is_backend_available("perseus")


def test_the_backend_serves_gpus_where_there_are_any(monkeypatch):
    """torch puts tensors of its own on a GPU if the group's backend serves GPUs."""
    served = dist.BackendConfig(dist.Backend("perseus")).get_device_backend_map()
    assert list(served) == ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert backend._devices_here() == ["cpu", "cuda"][: 1 + (count > 0)]


@pytest.mark.usefixtures("_alone")
def test_the_backend_says_that_it_estimates_no_times():
    estimator = distributed_c10d._time_estimator(device=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="time estimator is not supported"):
        estimator.__enter__()


@pytest.mark.usefixtures("_alone")
@pytest.mark.skipif(_VERSION >= (2, 14), reason="torch keeps the backends of its own groups")
def test_a_group_in_python_alone_is_its_own_backend_for_its_devices_alone():
    group = dist.group.WORLD
    assert group._device_types[0] == torch.device("cpu")
    assert group._get_backend(torch.device("cpu")) is group
    assert not group.supports_tensor_alloc(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"perseus serves cpu.* tensors here, not xpu"):
        group._get_backend(torch.device("xpu", 0))
    with pytest.raises(TypeError, match="does not support shrinking"):
        distributed_c10d._validate_shrink_backend_requirements(
            {"process_group": group, "group_name": "default"}
        )


@pytest.mark.parametrize(
    ("word", "counts"), [("1", True), ("yes", True), ("", True), ("false", False), ("OFF", False)]
)
def test_torchs_variables_count_unless_the_word_is_one_for_no(word, counts, monkeypatch):
    asked = []

    def launched_context(*_):
        asked.append(word)
        raise InterruptedError

    monkeypatch.setattr(basics, "launched_context", launched_context)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PERSEUS_USE_DDP_LAUNCHER", word)
    with contextlib.suppress(InterruptedError):
        launched.fill_environment()
    assert asked == ([] if counts else [word])


@pytest.fixture
def _alone():
    perseus.torch.distributed.register()
    dist.init_process_group("perseus", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_one_rank_alone_is_a_group():
    assert dist.get_backend() == "perseus"
    tensor = torch.arange(5.0)
    dist.all_reduce(tensor)
    parts = [torch.empty(5)]
    dist.all_gather(parts, tensor)
    assert torch.equal(tensor, torch.arange(5.0)) and torch.equal(parts[0], tensor)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3).expand(4, 3), "contiguous"),
        (torch.ones(3, dtype=torch.float8_e5m2), "SUM is not defined for torch.float8_e5m2"),
        pytest.param(
            torch.ones(3, device="meta"),
            "meta",
            marks=pytest.mark.skipif(
                _VERSION >= (2, 14), reason="torch does nothing for meta tensors, on any backend"
            ),
        ),
    ],
)
def test_a_tensor_that_cannot_be_reduced_is_refused(tensor, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        dist.all_reduce(tensor)


@pytest.mark.parametrize("days", [365, datetime.timedelta.max.days])
def test_a_timeout_may_be_longer_than_the_core_can_count(days):
    timeout = datetime.timedelta(days=days)
    perseus.torch.distributed.register()
    group = backend._create(dist.HashStore(), 0, 1, timeout)
    group.set_timeout(timeout)
    group.barrier().wait()
    group.shutdown()


def _ours():
    """What c10d calls, past the checks of torch.distributed."""
    return backend._group_of(dist.group.WORLD, "cpu")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    "call",
    [
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
        lambda o, i: _ours().all_to_all_single(o, i, [], []),
        lambda o, i: _ours().allgather([[o]], [i]),
        lambda o, i: _ours().allgather_coalesced([[o]], [i]),
        lambda o, i: _ours().all_gather_single_coalesced([o], [i]),
        lambda o, i: _ours().reduce_scatter([o], [[i]], dist.ReduceScatterOptions()),
        lambda o, i: _ours().reduce_scatter_single_coalesced([o], [i], dist.ReduceScatterOptions()),
        lambda o, i: _ours().gather([[o]], [i], dist.GatherOptions()),
        lambda o, i: _ours().scatter([o], [[i]], dist.ScatterOptions()),
        lambda o, i: _ours().alltoall([o], [i]),
    ],
)
def test_an_output_of_another_dtype_is_refused(call):
    output = torch.full((3,), 7, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"the same dtype, got torch\.float64 and"):
        call(output, torch.arange(3.0, dtype=torch.float64))
    assert output.tolist() == [7, 7, 7]


@pytest.mark.usefixtures("_alone")
def test_a_completed_work_has_written_its_output():
    given, output = torch.arange(3), torch.full((3,), -1)
    work = dist.reduce_scatter_tensor(output, given, op=dist.ReduceOp.BXOR, async_op=True)
    _wait_until(work.is_completed)
    assert torch.equal(output, given)
    assert work.is_success() and work.exception() is None


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop")])
def test_whoever_waits_for_a_callback_hears_of_any_exception_in_it(error):
    def callback(_):
        raise error

    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(callback)
    _wait_until(future.done)
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: {error}"):
        future.wait()


def _start_no_thread(_):
    raise RuntimeError("can't start new thread")


@pytest.mark.usefixtures("_alone")
def test_a_future_whose_thread_cannot_be_started_can_be_asked_for_again(monkeypatch):
    tensor = torch.arange(3.0)
    work = dist.all_reduce(tensor, async_op=True)
    completer, called = Completer(stays=False), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _start_no_thread)
        for call in (work.get_future, lambda: completer.call(lambda: called.append(1))):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                call()
    future = work.get_future()
    _wait_until(future.done)
    assert torch.equal(future.wait()[0], tensor)
    completer.call(lambda: called.append(2))
    _wait_until(lambda: 2 in called)
    assert called == [2]  # what has failed is not done later


def test_no_exception_of_a_job_keeps_later_jobs_from_running():
    completer, called = Completer(), threading.Event()
    completer.call(sys.exit)
    completer.call(called.set)
    assert called.wait(30)
    completer.end()


@pytest.mark.usefixtures("_alone")
def test_a_callback_may_add_callbacks_to_its_own_future():
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    future.wait()
    called, order = threading.Event(), []

    def call(left):
        def callback(completed):
            order.append(left)
            if left == 0:
                called.set()
            else:
                completed.add_done_callback(call(left - 1))

        return callback

    future.add_done_callback(call(3))
    assert called.wait(30), "the thread that runs callbacks waits for itself"
    assert order == [3, 2, 1, 0]


@pytest.mark.usefixtures("_alone")
def test_the_text_into_which_ddp_turns_a_hooks_error_tells_why_the_group_has_ended():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):  # the second makes the buckets anew, which is a collective
        model(torch.ones(1, 2)).sum().backward()
    assert backend.failure_of(RuntimeError("of the script")) is None
    _ours().world.context.shutdown()  # as if another rank had
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert backend.failure_of(caught.value) == _ours().world.failure()


@pytest.mark.usefixtures("_alone")
def test_once_a_group_has_failed_any_error_may_come_from_the_world(monkeypatch):
    """The group may notice a lost rank before the world does."""
    answers = [None, None, "lost rank 1"]
    monkeypatch.setattr(basics, "world_failure", lambda: answers.pop(0))
    assert backend.failure_of(RuntimeError("cast")) is None
    _ours().world.context.shutdown()
    assert backend.failure_of(RuntimeError("cast")) == "lost rank 1"


@pytest.mark.usefixtures("_alone")
def test_threads_of_futures_end_with_their_group():
    def threads():
        return [each for each in threading.enumerate() if each.name == "perseus futures"]

    _wait_until(lambda: not threads())
    for _ in range(3):
        group = dist.new_group([0])
        for each in (None, group):
            dist.all_reduce(torch.ones(3), group=each, async_op=True).get_future().wait()
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert len(threads()) == 2
        dist.destroy_process_group(group)
        _wait_until(lambda: len(threads()) == 1)
        with contextlib.suppress(RuntimeError):  # it may have ended before the group
            work.get_future().wait()
        _wait_until(lambda: len(threads()) == 1)


_ENDING = """
import torch, torch.distributed as dist, perseus.torch.distributed
perseus.torch.distributed.register()
dist.init_process_group("perseus", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(700, 700)
future = dist.all_reduce(x, async_op=True).get_future()
future.then(lambda _: [torch.mm(x, x) for _ in range(30)])
"""


def test_a_process_ends_in_peace_while_a_callback_computes():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


_FORKING = """
import os, signal, torch, torch.distributed as dist, perseus.torch.distributed
perseus.torch.distributed.register()
def wait_for_a_future():
    dist.init_process_group("perseus", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    dist.destroy_process_group()
wait_for_a_future()
if os.fork() == 0:
    signal.alarm(30)
    wait_for_a_future()
else:
    raise SystemExit(os.wait()[1])
"""


def test_futures_complete_in_a_fork_of_a_process_that_had_some():
    assert subprocess.run([sys.executable, "-c", _FORKING], timeout=60).returncode == 0


def _wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("_alone")
def test_works_that_nobody_waits_for_leave_nothing_behind():
    operations = _ours().world.operations
    given = torch.ones(3)
    reference = weakref.ref(given)
    for tensor in (given, torch.ones(3), torch.ones(3)):
        dist.all_reduce(tensor, async_op=True)
    del given, tensor

    def is_released():
        dist.all_reduce(torch.ones(3), async_op=True)  # where others are looked at again
        return reference() is None and operations.open_handles() <= 2

    _wait_until(is_released)
    # One work in place of several, which must not give up the operations.
    outputs = [torch.empty(3), torch.empty(3)]
    options = _distributed_c10d.AllgatherOptions()
    work = _ours().all_gather_single_coalesced(outputs, [torch.ones(3), torch.ones(3)], options)
    work.wait()
    assert all(torch.equal(output, torch.ones(3)) for output in outputs)


def test_counts_of_what_was_received_may_exceed_32_bits():
    buffer = bytearray(torch.arange(3.0).numpy().tobytes())
    counts = (2**31, 2**40)
    output, received = world.wrap(buffer, (3,), torch.empty(0), counts)
    assert torch.equal(output, torch.arange(3.0)) and received == counts
    _, received = session.wrap(buffer, (3,), torch.empty(0), (1, 2))
    assert received.dtype == torch.int32 and received.tolist() == [1, 2]


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_ranks_that_do_not_come_are_named(rank, missing):
    perseus.torch.distributed.register()
    limit = datetime.timedelta(seconds=1)
    with pytest.raises(InitializationError, match=rf"{missing}.* within 1 s \(timeout="):
        dist.init_process_group(
            "perseus", store=dist.HashStore(), rank=rank, world_size=3, timeout=limit
        )
    assert not dist.is_initialized()


RESTARTED = """
import os, torch, torch.distributed as dist
import perseus.torch.distributed
dist.init_process_group("perseus")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(7)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(f"ended with {tensor.tolist()}", flush=True)  # torchrun runs Python with -u
"""


@pytest.mark.shared
def test_torchrun_restarts_ranks_into_a_new_group(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*torchrun, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended with [6.0, 6.0, 6.0]") == 2, done.stdout


ON_TWO_RANKS = """
import json, sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
import perseus.torch.distributed
place, rank = f"file://{sys.argv[1]}", int(sys.argv[2])
dist.init_process_group("perseus", init_method=place, rank=rank, world_size=2)
tensor = torch.full((3,), rank + 1.0)
"""


def on_two_ranks(folder: Path, program: str, **environment: str) -> list[str]:
    """What each rank prints."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ON_TWO_RANKS + program, str(folder / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return said


RECORDED = """
dist.all_reduce(tensor)
dist.broadcast(tensor, 0)
dist.all_gather([torch.empty(3), torch.empty(3)], tensor)
print(c10d._dump_fr_trace_json(backend="perseus").decode())
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    _VERSION < (2, 15),
    reason="before torch 2.15 only what ProcessGroupNCCL and ProcessGroupGloo do can be read",
)
def test_torchs_flight_recorder_sees_every_collective_once_it_is_asked_for(tmp_path):
    for said in on_two_ranks(tmp_path, RECORDED, TORCH_FR_BUFFER_SIZE="100"):
        entries = json.loads(said)["entries"]
        names = [entry["profiling_name"] for entry in entries]
        assert names == ["perseus:all_reduce", "perseus:broadcast", "perseus:all_gather"]
        assert [entry["input_sizes"] for entry in entries] == [[[3]]] * 3


MISMATCHED = """
for call in (
    lambda: dist.all_reduce(torch.ones(3 + rank)),
    lambda: dist.all_reduce(tensor) if rank == 0 else dist.broadcast(tensor, 0),
):
    try:
        call()
        print("no error")
    except RuntimeError as error:
        print(str(error).split(". ")[0])
dist.all_reduce(tensor)
print(tensor.tolist())
dist.destroy_process_group()
"""


@_BESIDE_OTHERS
def test_torchs_detailed_debug_mode_finds_mismatches(tmp_path):
    for said in on_two_ranks(tmp_path, MISMATCHED, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        found = "Detected mismatch between collectives on ranks"
        assert said.splitlines() == [found, found, "[3.0, 3.0, 3.0]"]
