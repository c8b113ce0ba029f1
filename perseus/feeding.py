"""A survivor of an elastic job feeds new ranks, while it trains and they wait for the next world.

Only what training leaves as it is can be sent early: frozen parameters, and rows of embeddings that
few steps touch. The survivor looks at the blocks of its state before and after whole steps, and
sends those that have not changed, over a world of its own between it and the new ranks. They keep
them under their hashes; sync() then sends only what some rank lacks (elastic/known_blocks.py).

A thread of each process does its part. A feed that fails is over, and sync() sends more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perseus import basics
from perseus.control import describe_memory
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
_LOOK_AGAIN_SECONDS = 0.05
_BYTES_AT_ONCE = 1 << 26
_STEPS = 2  # calls of on_step() that have a whole step between them
_LOOKS = 10  # without a change, after which nothing is thought to change
_END_SECONDS = 10.0
_SETTINGS = (
    "HOROVOD_START_TIMEOUT=600",  # the survivor comes once it knows what to send
    "HOROVOD_TIMELINE=DYNAMIC",  # none: "" would leave the user's file in force
    f"HOROVOD_AUTOTUNE_LOG={os.devnull}",  # likewise
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
        self._closed = False
        self._steps = 0
        self.contents: Contents = list
        # What this rank has been fed, by hash.
        self.blocks: dict[bytes, bytes] = {}
        atexit.register(self.close)

    def take_part(self, feed: words.Feed) -> None:
        """Begin this process's part of a feed. One that is still under way comes first."""
        if self._closed:
            raise RuntimeError("the process ends")
        given = feed, self._thread, self._stopped
        thread = threading.Thread(target=self._run, args=given, daemon=True)
        thread.start()
        self._thread = thread

    def on_step(self) -> None:
        """Training has done a step, or more of them, since the last call."""
        self._steps += 1

    def close(self) -> None:
        """The process ends."""
        self._closed = True
        self.stop()

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
                batches = _batches(resting(self.contents, stopped, self._await_steps))
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

    def _await_steps(self, stopped: threading.Event) -> None:
        """Wait until a whole step has been done from now on."""
        end = self._steps + _STEPS
        while self._steps < end and not stopped.wait(_LOOK_AGAIN_SECONDS):
            pass


def attach(member: Membership) -> Feeding:
    """The process's part in feeds; from the first call on it takes part in them."""
    if member.feeding is None:
        member.feeding = Feeding(member)
        member.on_feed = member.feeding.take_part
        basics.at_end(member.feeding.blocks.clear)
    found: Feeding = member.feeding
    return found


def note_step() -> None:
    """Training has done a step, or more of them, since the last call."""
    member = basics.membership()
    if member is not None and member.feeding is not None:
        member.feeding.on_step()


def blocks_of(view: memoryview) -> Iterator[memoryview]:
    """Its blocks; the last one may be shorter."""
    return (view[first : first + BLOCK] for first in range(0, len(view), BLOCK))


def _hashes(view: Any) -> bytes:
    """The hashes of its blocks, one behind the other."""
    from perseus import _core

    hashes: bytes = _core.hash_blocks(view, BLOCK)
    return hashes


def _look(contents: Contents, stopped: threading.Event) -> list[bytes]:
    """The hashes of all arrays; too few of them once stopped."""
    looked: list[bytes] = []
    for view in contents():
        pieces = []
        for first in range(0, len(view), _BYTES_AT_ONCE):
            if stopped.is_set():
                return looked
            pieces.append(_hashes(view[first : first + _BYTES_AT_ONCE]))
        looked.append(b"".join(pieces))
    return looked


def resting(
    contents: Contents, stopped: threading.Event, await_step: Callable[[threading.Event], None]
) -> Iterator[bytes]:
    """Yield copies of the blocks that training does not change.

    await_step: returns once a whole step has been done since it was called.
    """
    looks = [_look(contents, stopped)]
    for _ in range(_LOOKS if any(looks[0]) else 0):
        await_step(stopped)
        looks[1:] = [_look(contents, stopped)]
        if looks[1] != looks[0]:  # perhaps in the middle of a step
            await_step(stopped)
            looks.append(_look(contents, stopped))
            break
    for view, *hashes in zip(contents(), *looks, strict=False):
        for number, block in enumerate(blocks_of(view)):
            if stopped.is_set():
                return
            place = slice(HASH * number, HASH * (number + 1))
            if len({each[place] for each in hashes}) == 1:
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
            self._context, lambda buffer, *_: buffer, describe_memory
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


def _batches(blocks: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    batch: list[bytes] = []
    for block in blocks:
        batch.append(block)
        if len(batch) == _BLOCKS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
