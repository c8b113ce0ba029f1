"""A rank of an elastic job asks perseusrun for its place in the next world, and hears of changes.

perseusrun gives every rank a socket, over which lines go both ways (words.py). join() belongs to
one thread; another one reads the socket.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from perseus.run.bootstrap import words
from perseus.run.bootstrap.words import Place

CONTROL_VARIABLE = "PERSEUS_CONTROL_FD"
_LOOK_AGAIN_SECONDS = 0.5  # how long Ctrl-C may have to wait
_CHUNK = 1 << 16
_CLOSED = "[elastic] perseusrun has closed the connection"


class Membership:
    """This process's connection to perseusrun.

    place: in the present world, or the last one; None before the first.
    will_sync: whether this rank takes the training's state from others in the next world, or gives
        it to them. All ranks must do the same, so `place.sync` says whether one of them will.
    has_state: whether this rank has the training's state; None if the script does not say.
    commits: so many have gone into that state. The rank that has most gives its to the others.
    has_begun: whether this rank has met all others of some world.
    is_at_fault: whether the last world did not begin for this rank because of an error of its own.
    on_news: called as on_news(timestamp, change, feeding) on another thread when hosts have
        changed, and again every few seconds until the ranks come to join. For change see
        HostUpdateResult, for feeding words.News.
    on_feed: called on that thread with this rank's part in a feed, which ends by tell(Fed(…)).
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._answer: words.Place | words.Leave | words.Refuse | None = None
        self._lost = ""  # why there is no connection any more
        self.place: Place | None = None
        self.will_sync = True
        self.has_state: bool | None = None
        self.commits = 0
        self.has_begun = False
        self.is_at_fault = False
        self.on_news: Callable[[float, int, bool], None] | None = None
        self.on_feed: Callable[[words.Feed], None] | None = None
        self.feeding: Any = None  # perseus.feeding's part of it
        try:
            threading.Thread(target=self._read, daemon=True).start()
        except BaseException:
            self._socket.detach()  # for the next attempt
            raise

    def is_of_this_process(self) -> bool:
        """Whether no process between perseusrun's and this one has forked it."""
        return os.getpid() == self._pid

    def join(self) -> Place:
        """Wait for the next world and take the place in it that perseusrun assigns.

        Sets the variables of the identity. Raises SystemExit: with status 0 if the job does not
        need this rank any more, and with a message if there is no next world because another rank
        has finished. Raises RuntimeError if perseusrun cannot be reached.
        """
        if not self.is_of_this_process():
            raise RuntimeError(
                "[elastic] a process that a rank has forked cannot be a rank: call init() in the "
                "process that perseusrun has started"
            )
        with self._changed:
            self._answer = None
            self._write(words.Join(self.will_sync, self.has_state, self.commits, self.is_at_fault))
            while self._answer is None:
                if self._lost:
                    raise RuntimeError(self._lost)
                self._changed.wait(_LOOK_AGAIN_SECONDS)
            answer = self._answer
        if isinstance(answer, words.Leave):
            print(f"[elastic] this rank leaves: {answer.why}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if isinstance(answer, words.Refuse):
            raise SystemExit(f"[elastic] {answer.why}")
        os.environ.update(answer.environment)
        self.place = answer
        self.will_sync = True
        self.is_at_fault = False
        return self.place

    def tell_begun(self) -> None:
        """Say that this rank has met all others of its world."""
        assert self.place is not None
        self.has_begun = True
        with self._changed:
            self._write(words.Begun(self.place.epoch))

    def tell_loop(self, number: int) -> None:
        """Say that this rank begins a loop of elastic training, the number-th of its process."""
        self.tell(words.Loop(number))

    def tell(self, word: words.FromRank) -> None:
        """Say something to perseusrun. Thread-safe."""
        with self._changed:
            self._write(word)

    def _write(self, word: words.FromRank) -> None:
        try:
            self._socket.sendall(words.line_of(word) + b"\n", socket.MSG_NOSIGNAL)
        except OSError:
            self._lost = _CLOSED

    def _read(self) -> None:
        why, rest = _CLOSED, b""
        try:
            while data := self._socket.recv(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(words.from_launcher(line))
        except OSError:
            pass
        except ValueError as error:
            why = str(error)
        finally:
            with self._changed:  # or join() would wait for ever
                self._lost = why
                self._changed.notify_all()

    def _take(self, word: words.FromLauncher) -> None:
        if isinstance(word, words.Ping):
            with self._changed:
                self._write(words.Pong())
        elif isinstance(word, words.News):
            if self.on_news is not None:
                self.on_news(word.at, word.change, word.feeding)
        elif isinstance(word, words.Feed):
            self._take_part(word)
        else:
            with self._changed:
                self._answer = word
                self._changed.notify_all()

    def _take_part(self, feed: words.Feed) -> None:
        try:
            if self.on_feed is None:
                raise RuntimeError("nobody can")
            self.on_feed(feed)
        except RuntimeError:  # also where no thread can be started
            self.tell(words.Fed(feed.number, 0))


_membership: Membership | None = None


def membership() -> Membership | None:
    """Return this process's membership in an elastic job; None in any other job."""
    global _membership
    descriptor = os.environ.get(CONTROL_VARIABLE, "")
    if descriptor:
        try:
            _membership = Membership(int(descriptor))
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"[elastic] {CONTROL_VARIABLE}={descriptor}: the socket to perseusrun is not open "
                f"({error}): something between perseusrun and this process has closed it"
            ) from None
        del os.environ[CONTROL_VARIABLE]  # only now, or the next attempt would train alone
    return _membership
