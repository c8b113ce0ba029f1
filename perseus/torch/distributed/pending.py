"""What a process group has under way and nobody has waited for: its barriers wait for that.

Works end in their owners' hands, or are left behind: then what they would have written is written
here. Any thread may call everything, and the garbage collector anywhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch

from perseus import _core
from perseus.failures import Failures
from perseus.torch.session import keep, keep_all

_LEAVE_SECONDS = 5.0


class InPlace:
    """What makes tensors of an operation's output where the core has written them itself."""

    __slots__ = ("keeps", "tensors")

    def __init__(self, tensors: list[torch.Tensor], keeps: bool = False) -> None:
        """keeps: whether nobody else refers to the output, which may still be used on a GPU."""
        self.tensors, self.keeps = tensors, keeps

    def __call__(self, output: Any) -> list[torch.Tensor]:
        if self.keeps:
            keep(output)
        return self.tensors


# A handle of World.operations, and what makes tensors of the operation's output.
Piece = tuple[int, Callable[[Any], list[torch.Tensor]]]


class Begun(Protocol):
    """A collective of this rank."""

    def settle(self) -> None:
        """Wait until it is done. Others get its error."""


class _Left:
    """What is left of a work to which nobody refers."""

    __slots__ = ("counts", "lock", "pieces")

    def __init__(self, pieces: list[Piece], counts: bool) -> None:
        self.pieces, self.counts = pieces, counts
        self.lock = threading.Lock()  # of who ends it


class Pending:
    """The collectives of this rank in one group that are not known to be done.

    left: what is left of works to which nobody refers.
    """

    def __init__(self, operations: _core.Operations) -> None:
        """operations: the group's."""
        self._operations = operations
        # Changed by single operations of dictionaries alone, because any thread may interrupt.
        self._begun: dict[int, ref[Begun]] = {}
        self.left: dict[_Left, None] = {}
        self._unseen = Failures()  # of what is left

    def begun(self, work: Begun) -> None:
        """Let the barriers that follow wait for it, until settled()."""
        self._begun[id(work)] = ref(work)

    def settled(self, work: Begun) -> None:
        """Let no barrier wait for it any more."""
        self._begun.pop(id(work), None)

    def under_way(self) -> list[Callable[[], object]]:
        """Return what waits for the collectives of this rank that nobody has waited for yet."""
        works = [work for each in list(self._begun.values()) if (work := each()) is not None]
        left = [each for each in list(self.left) if each.counts]
        return [*(work.settle for work in works), *(partial(self._settle, each) for each in left)]

    def abandon(self, pieces: list[Piece], counts: bool) -> None:
        """End operations for which nobody waits, once they are done.

        counts: whether barriers wait for them. It does not block, because the garbage collector may
        call it anywhere. It copies nothing either: the caller may be within a mode of torch. What
        has to be copied waits for the next operation.
        """
        self.left[_Left(pieces, counts)] = None
        self.end_left(copies=False)

    def end_left(self, copies: bool = True) -> None:
        """End those of them that are done; the others are looked at again.

        copies: whether also those whose output is not in place.
        """
        for each in list(self.left):
            if not copies and not all(isinstance(finish, InPlace) for _, finish in each.pieces):
                continue
            # Another thread may end it, or a call that the garbage collector interrupts here.
            if each.lock.acquire(blocking=False):
                try:
                    if all(self._is_done(handle) for handle, _ in each.pieces):
                        self._finish(each)
                finally:
                    each.lock.release()

    def _is_done(self, handle: int) -> bool:
        try:
            return self._operations.poll(handle)
        except Exception:  # it is not known any more
            return True

    def _settle(self, left: _Left) -> None:
        with left.lock:
            self._finish(left)

    def _finish(self, left: _Left) -> None:
        """Wait for it, and end it. Called with its lock."""
        while left.pieces:
            handle, finish = left.pieces[0]
            try:
                output = self._operations.synchronize(handle)
                if isinstance(finish, InPlace):
                    keep_all(output)  # what is done may still be copied to its GPU
                elif output is not None:
                    finish(output)
            except Exception as error:
                if left.counts:
                    self._unseen.add(error)
            del left.pieces[0]
        self.left.pop(left, None)

    def leave(self) -> None:
        """End what is left, once every rank has started what it will; wait some seconds for it.

        Some rank may never have started its part.
        """
        deadline = time.monotonic() + _LEAVE_SECONDS
        for each in list(self.left):
            with contextlib.suppress(Exception):
                for handle, _ in each.pieces if each.counts else []:
                    self._operations.wait(handle, max(0.0, deadline - time.monotonic()))
        self.end_left()

    def raise_unseen(self) -> None:
        """Raise what collectives have raised for whose end nobody waits."""
        unseen, self._unseen = self._unseen, Failures()
        unseen.raise_first()
