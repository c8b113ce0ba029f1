"""A survivor of an elastic job feeds new ranks, while it trains and they wait for the next world.

Only what training leaves as it is can be sent early: frozen parameters, and rows of embeddings that
few steps touch. The survivor looks at blocks of its state twice, with a step in between, and sends
those that have not changed, over a world of its own between it and the new ranks. They keep them
under their hashes; sync() then sends only what some rank lacks (elastic/known_blocks.py).

A thread of each process does its part. A feed that fails is over, and sync() sends more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perseus.operations import Kind
from perseus.run.bootstrap import words
from perseus.run.bootstrap.identity import Identity
from perseus.run.bootstrap.membership import Membership
from perseus.run.bootstrap.rendezvous import find_store

if TYPE_CHECKING:
    from perseus import _core

BLOCK = 1 << 14  # bytes of an array that are compared as one
HASH = 16  # bytes of a block's hash
_BLOCKS_AT_ONCE = 256
_SIZES = struct.Struct(f"<{_BLOCKS_AT_ONCE}H")  # of a message's blocks, less one; 0 is behind them
_COUNT = struct.Struct("<H")
_UINT8 = 4  # enum perseus_dtype
_LOOK_AGAIN_SECONDS = 0.1
_END_SECONDS = 10.0
_SETTINGS = (
    "HOROVOD_START_TIMEOUT=600",  # the survivor comes once it knows what to send
    "HOROVOD_TIMELINE=",
    "PERSEUS_FLIGHT_RECORDER=off",
    "PERSEUS_LOG_LEVEL=fatal",
)

_log = logging.getLogger(__name__)

# Finds the arrays of this rank's state; each is contiguous, and may change while it is read.
Contents = Callable[[], Iterable[memoryview]]


class Feeding:
    """This process's part in the feeds of its job."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._stopped = threading.Event()
        self._exchange: _Exchange | None = None
        self._thread: threading.Thread | None = None
        self.contents: Contents = list
        # What this rank has been fed, by hash.
        self.blocks: dict[bytes, bytes] = {}
        atexit.register(self.stop)

    def take_part(self, feed: words.Feed) -> None:
        """Begin this process's part of a feed. One that is still under way comes first."""
        given = feed, self._thread, self._stopped
        self._thread = threading.Thread(target=self._run, args=given, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up what is under way: the next world begins, or the process ends."""
        if self._thread is not None:
            self._stopped.set()
            if (exchange := self._exchange) is not None:
                exchange.end()
            self._thread.join(_END_SECONDS)
            self._thread = None
        self._stopped = threading.Event()

    def _run(
        self, feed: words.Feed, before: threading.Thread | None, stopped: threading.Event
    ) -> None:
        count = 0
        if before is not None:
            before.join()
        try:
            if feed.rank == 0:
                batches = _batches(resting(self.contents, stopped))
                first = next(batches, ())  # now it is known what to send
            with _Exchange(feed, stopped) as self._exchange:
                if feed.rank == 0:
                    count = self._exchange.send(itertools.chain([first], batches), stopped)
                else:
                    for block in self._exchange.received():
                        self.blocks[_hashes(block)] = block
                        count += 1
                        if count == 1:  # the next world may begin before the feed ends
                            self._member.tell(words.Fed(feed.number, count))
        except Exception as error:  # whatever it is, sync() makes up for it
            _log.debug("[elastic] feed %d: %s", feed.number, error)
        self._exchange = None
        self._member.tell(words.Fed(feed.number, count))


def attach(member: Membership) -> Feeding:
    """The process's part in feeds; from the first call on it takes part in them."""
    if member.feeding is None:
        member.feeding = Feeding(member)
        member.on_feed = member.feeding.take_part
    found: Feeding = member.feeding
    return found


def blocks_of(view: memoryview) -> Iterator[memoryview]:
    """Its blocks; the last one may be shorter."""
    return (view[first : first + BLOCK] for first in range(0, len(view), BLOCK))


def _hashes(view: Any) -> bytes:
    """The hashes of its blocks, one behind the other."""
    from perseus import _core

    hashes: bytes = _core.hash_blocks(view, BLOCK)
    return hashes


def resting(contents: Contents, stopped: threading.Event) -> Iterator[bytes]:
    """Yield copies of the blocks that do not change when others do; none while nothing changes.

    Half of the time it does nothing, so that training has the processor.
    """
    before: list[bytes] = []
    while True:
        began = time.monotonic()
        after = [_hashes(view) for view in contents()]
        if stopped.is_set() or (before and before != after):
            break
        before = after
        stopped.wait(max(_LOOK_AGAIN_SECONDS, time.monotonic() - began))
    for view, first, second in zip(contents(), before, after, strict=False):
        for number, block in enumerate(blocks_of(view)):
            if stopped.is_set():
                return
            place = slice(HASH * number, HASH * (number + 1))
            if first[place] == second[place]:
                yield bytes(block)


class _Exchange:
    """A world of the ranks of one feed, in which rank 0 sends."""

    def __init__(self, feed: words.Feed, stopped: threading.Event) -> None:
        from perseus import _core

        def look() -> None:
            if stopped.is_set():
                raise InterruptedError

        # perseusrun's store does not ask who this rank is.
        store = find_store(Identity(feed.rank, feed.size, 0, 0, 0, 0, "perseusrun"))
        self._context = _core.Context(
            rank=feed.rank,
            size=feed.size,
            store_host=store.host,
            store_port=store.port,
            secret=store.secret,
            job=f"feed.{feed.number}",
            overrides=_SETTINGS,
            interrupted=look,
        )
        self._operations: _core.Operations = _core.Operations(
            self._context, lambda buffer, *_: buffer, _describe
        )

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def end(self) -> None:
        """End it on all ranks, from any thread; it may have ended."""
        with contextlib.suppress(ValueError, RuntimeError):
            self._context.abort("the feed is not wanted any more")

    def send(self, batches: Iterable[Sequence[bytes]], stopped: threading.Event) -> int:
        """Send blocks, and return how many. At most half of the time goes to that."""
        sent = 0
        for batch in batches:
            began = time.monotonic()
            self._broadcast(_COUNT.pack(len(batch)))
            if not batch:
                break
            sizes = [len(block) - 1 for block in batch] + [0] * (_BLOCKS_AT_ONCE - len(batch))
            self._broadcast(_SIZES.pack(*sizes))
            self._broadcast(b"".join(batch))
            sent += len(batch)
            stopped.wait(time.monotonic() - began)
        else:
            self._broadcast(_COUNT.pack(0))
        return sent

    def received(self) -> Iterator[bytes]:
        """Yield what rank 0 sends."""
        while True:
            (count,) = _COUNT.unpack(self._broadcast(bytes(_COUNT.size)))
            if count == 0:
                return
            sizes = _SIZES.unpack(self._broadcast(bytes(_SIZES.size)))[:count]
            data = self._broadcast(bytes(sum(sizes) + count))
            first = 0
            for size in sizes:
                yield data[first : first + size + 1]
                first += size + 1

    def _broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data, which has the same size everywhere."""
        memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
        handle = self._operations.submit(Kind.BROADCAST, "feed", memory, memory)
        self._operations.synchronize(handle)
        return memory.raw


def _describe(memory: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return ctypes.addressof(memory), (len(memory),), (1,), _UINT8


def _batches(blocks: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    batch: list[bytes] = []
    for block in blocks:
        batch.append(block)
        if len(batch) == _BLOCKS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
