"""Who waits for an operation on a GPU waits for what another thread's stream does with its tensors.

Streams stand in here; test/gpu has the real ones, on machines that have a GPU.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from perseus.torch.distributed import streams
from perseus.torch.distributed.completer import Completer, calling
from perseus.torch.distributed.future import Future
from perseus.torch.distributed.pending import Pending
from perseus.torch.distributed.work import Work, joined

GPU = torch.device("cuda:0")


class Stream:
    """A stream that notes what it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[str] = []

    def record_event(self) -> str:
        return f"{self.name} after {self.given}"

    def wait_event(self, event: str) -> None:
        self.given.append(f"wait for {event}")


class Tensor:
    """A tensor that notes who uses it."""

    is_sparse, is_cuda, device = False, True, GPU

    def __init__(self) -> None:
        self.users: list[str] = []

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream.name)


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function in a thread of its own, on a stream."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.stream)

    def run(stream: Stream, call: Any) -> None:
        failures: list[BaseException] = []

        def body() -> None:
            current.stream = stream
            try:
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    return run


def _work(stream: Stream, tensor: Any, device: Any = GPU, error: Exception | None = None) -> Work:
    def synchronize(handle: int) -> int:
        if error is not None:
            raise error
        stream.given.append(f"store {handle}")
        return handle

    def finish(handle: int) -> list[Any]:
        stream.given.append(f"copy {handle}")
        return [tensor]

    world: Any = SimpleNamespace(
        operations=SimpleNamespace(synchronize=synchronize),
    )
    world.pending = Pending(world.operations)
    return Work(world, [(1, finish), (2, finish)], device)


def test_every_stream_that_waits_waits_for_the_one_that_settled(on_stream):
    first, second, tensor = Stream("first"), Stream("second"), Tensor()
    work = _work(first, tensor)
    on_stream(first, work.wait)
    done = ["store 1", "copy 1", "store 2", "copy 2"]
    assert first.given == done
    assert tensor.users == []
    on_stream(second, work.wait)
    on_stream(first, work.wait)
    assert second.given == [f"wait for first after {done}"]
    assert first.given == done
    assert tensor.users == ["second", "second"]  # two pieces have written it


def test_a_failed_work_orders_streams_before_it_raises(on_stream):
    first, second = Stream("first"), Stream("second")
    work = _work(first, Tensor(), error=RuntimeError("lost rank 1"))
    for stream in (first, second):
        with pytest.raises(torch.distributed.DistBackendError, match="lost rank 1"):
            on_stream(stream, work.wait)
    assert second.given == ["wait for first after []"]


def test_works_that_are_one_lie_where_the_first_with_tensors_lies(on_stream):
    first, second, tensor = Stream("first"), Stream("second"), Tensor()
    works = [_work(first, tensor, None), _work(first, tensor)]
    work = joined(works[1]._world, lambda: works)
    on_stream(first, work.wait)
    on_stream(second, work.wait)
    assert len(second.given) == 1


def test_sparse_tensors_parts_are_kept_for_the_stream(on_stream):
    parts = Tensor(), Tensor()
    sparse = SimpleNamespace(is_sparse=True, _indices=lambda: parts[0], _values=lambda: parts[1])
    first, second = Stream("first"), Stream("second")
    work = _work(first, sparse)
    on_stream(first, work.wait)
    on_stream(second, work.wait)
    assert [set(part.users) for part in parts] == [{"second"}, {"second"}]


def test_host_memory_needs_no_streams():
    for given in (torch.ones(3), [torch.ones(3)], (torch.ones(3), torch.ones(2)), None, [], ()):
        assert streams.gpu_of(given) is None
    with streams.aside(None):
        pass


class _OfAGpu(Future):
    """A future of a GPU as far as Perseus is concerned, which torch has for one of the CPU."""

    def __init__(self) -> None:
        super().__init__(Completer(stays=False))
        self._device = GPU


def test_an_error_that_cannot_be_pickled_keeps_its_text(on_stream):
    class LocalError(Exception):
        pass

    plain, local = _OfAGpu(), _OfAGpu()
    on_stream(Stream("one"), lambda: plain.complete(None, ZeroDivisionError("by zero")))
    on_stream(Stream("one"), lambda: local.complete(None, LocalError("no such thing")))
    with pytest.raises(ZeroDivisionError, match="by zero"):
        plain.wait()
    with pytest.raises(RuntimeError, match="LocalError: no such thing"):
        local.wait()


def test_a_gpu_that_fails_ends_the_wait_for_its_tensors(on_stream):
    class Broken(Stream):
        def record_event(self) -> str:
            raise RuntimeError("an illegal memory access was encountered")

    future = _OfAGpu()
    on_stream(Broken("broken"), lambda: future.complete([1], None))
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        future.wait()
    work = _work(Stream("fine"), Tensor())
    for stream in (Broken("broken"), Stream("another")):
        with pytest.raises(torch.distributed.DistBackendError, match="an illegal memory access"):
            on_stream(stream, work.wait)


def test_callbacks_that_fail_leave_the_others_their_thread():
    completer = Completer()
    first, second, called = Future(completer), Future(completer), []
    completer.call(lambda: first.complete(1, None))
    first.wait()
    first.add_done_callback(lambda _: 1 / 0)
    completer.call(lambda: 1 / 0)
    first.add_done_callback(lambda future: called.append((future.value(), calling() is completer)))
    completer.call(lambda: second.complete(2, None))
    assert second.then(lambda future: future.value() + 1).wait() == 3
    assert called == [(1, True)]
    completer.end()
