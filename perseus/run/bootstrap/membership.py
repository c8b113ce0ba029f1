"""A rank of an elastic job asks perseusrun for its place in the next world, and hears of changes.

perseusrun gives every rank a socket, over which lines of JSON go both ways. A rank writes
{"join": …} and waits until perseusrun answers {"place": …}, {"leave": …} or {"refuse": …}. Once it
has met the others, it writes {"begun": …}. In between, perseusrun may write {"news": …} and
{"ping": …}. join() belongs to one thread; another one reads the socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONTROL_VARIABLE = "PERSEUS_CONTROL_FD"
_LOOK_AGAIN_SECONDS = 0.5  # how long Ctrl-C may have to wait
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Place:
    """A place in a world. The variables of its identity are in the environment.

    commits: so many have gone into the state that rank 0 has.
    epoch: the number of the world. sync: whether a rank of it lacks the training's state.
    """

    epoch: int
    sync: bool
    commits: int


class Membership:
    """This process's connection to perseusrun.

    place: in the present world, or the last one; None before the first.
    will_sync: whether this rank takes the training's state from others in the next world, or gives
        it to them. All ranks must do the same, so `place.sync` says whether one of them will.
    has_state: whether this rank has the training's state; None if the script does not say.
    commits: so many have gone into that state. The rank that has most gives its to the others.
    on_news: called as on_news(timestamp, change) on another thread when hosts have changed, and
        again every few seconds until the ranks come to join. change: see HostUpdateResult.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._lost = False
        self.place: Place | None = None
        self.will_sync = True
        self.has_state: bool | None = None
        self.commits = 0
        self.on_news: Callable[[float, int], None] | None = None
        threading.Thread(target=self._read, daemon=True).start()

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
            wish = {"sync": self.will_sync, "state": self.has_state, "commits": self.commits}
            self._write({"join": wish})
            while self._answer is None:
                if self._lost:
                    raise RuntimeError("[elastic] perseusrun has closed the connection")
                self._changed.wait(_LOOK_AGAIN_SECONDS)
            answer = self._answer
        if "leave" in answer:
            print(f"[elastic] this rank leaves: {answer['leave']}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if "refuse" in answer:
            raise SystemExit(f"[elastic] {answer['refuse']}")
        found = answer["place"]
        os.environ.update(found["environment"])
        self.place = Place(found["epoch"], found["sync"], found.get("commits", 0))
        self.will_sync = True
        return self.place

    def tell_begun(self) -> None:
        """Say that this rank has met all others of its world."""
        assert self.place is not None
        with self._changed:
            self._write({"begun": self.place.epoch})

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n", socket.MSG_NOSIGNAL)
        except OSError:
            self._lost = True

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            with self._changed:
                self._write({"pong": message["ping"]})
        elif "news" in message:
            if self.on_news is not None:
                self.on_news(*message["news"])
        else:
            with self._changed:
                self._answer = message
                self._changed.notify_all()


_membership: Membership | None = None


def membership() -> Membership | None:
    """Return this process's membership in an elastic job; None in any other job."""
    global _membership
    descriptor = os.environ.pop(CONTROL_VARIABLE, "")
    if descriptor:
        try:
            _membership = Membership(int(descriptor))
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"[elastic] {CONTROL_VARIABLE}={descriptor}: the socket to perseusrun is not open "
                f"({error}): something between perseusrun and this process has closed it"
            ) from None
    return _membership
