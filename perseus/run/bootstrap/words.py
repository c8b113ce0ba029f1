"""What perseusrun and a rank of an elastic job write to each other: lines of JSON, checked.

A rank writes {"join": …} and waits until perseusrun answers {"place": …}, {"leave": …} or
{"refuse": …}. Once it has met the others, it writes {"begun": …}, and {"loop": …} when it begins to
train. In between, perseusrun may write {"news": …}, {"ping": …}, which the rank answers by {"pong":
…}, and {"feed": …}, which it answers by {"fed": …} (perseus/feeding.py). Pure functions,
thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Join:
    """A rank wants a place in the next world.

    sync: whether it will take the training's state from others there, or give it to them.
    state: whether it has that state; None if its script does not say.
    commits: so many have gone into that state.
    fault: whether the last world did not begin for this rank because of an error of its own.
    """

    sync: bool
    state: bool | None
    commits: int
    fault: bool = False


@dataclass(frozen=True)
class Begun:
    """A rank has met all others of a world. epoch: the world's number."""

    epoch: int


@dataclass(frozen=True)
class Loop:
    """A rank begins a loop of elastic training. number: so many its process has begun by now."""

    number: int


@dataclass(frozen=True)
class Pong:
    """A rank answers a ping."""


@dataclass(frozen=True)
class Fed:
    """A rank has done its part of a feed.

    number: the feed's. blocks: how many it has sent or received.
    """

    number: int
    blocks: int


@dataclass(frozen=True)
class Place:
    """A rank has a place in a world.

    epoch: the world's number. sync: whether a rank of it lacks the training's state.
    commits: so many have gone into the state that rank 0 has.
    fed: whether a rank of it has been fed.
    environment: the variables of the rank's identity.
    """

    epoch: int
    sync: bool
    commits: int
    fed: bool
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Leave:
    """The job does not need a rank any more."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """There is no next world."""

    why: str


@dataclass(frozen=True)
class News:
    """Hosts have changed.

    at: a time. change: see perseus.elastic.HostUpdateResult. feeding: whether new ranks are being
    fed, so that it is better to wait for a while.
    """

    at: float
    change: int
    feeding: bool


@dataclass(frozen=True)
class Ping:
    """perseusrun asks whether a rank lives."""


@dataclass(frozen=True)
class Feed:
    """A rank has a part in a feed.

    number: the feed's. rank: 0 for the survivor that sends, others receive. size: how many there
    are.
    """

    number: int
    rank: int
    size: int


FromRank = Join | Begun | Loop | Pong | Fed
FromLauncher = Place | Leave | Refuse | News | Ping | Feed


def line_of(word: FromRank | FromLauncher) -> bytes:
    """Return the line that stands for a word, without its end."""
    value: Any = vars(word) or 0
    if isinstance(word, (Begun, Loop, Leave, Refuse)):
        (value,) = vars(word).values()
    elif isinstance(word, (News, Feed, Fed)):
        value = [*vars(word).values()]
    return json.dumps({type(word).__name__.lower(): value}).encode()


def from_rank(line: bytes) -> FromRank:
    """Return what a rank says; raise ValueError if no rank says that."""
    kind, value = _only_item(line, "a rank")
    if kind == "join" and isinstance(value, dict):
        sync, state, commits = (value.get(key) for key in ("sync", "state", "commits"))
        if not isinstance(fault := value.get("fault", False), bool):
            raise _unexpected(line, "a rank")
        if isinstance(sync, bool) and isinstance(state, bool | None) and _is_natural(commits):
            return Join(sync, state, commits, fault)
    elif kind == "begun" and _is_natural(value):
        return Begun(value)
    elif kind == "loop" and _is_natural(value):
        return Loop(value)
    elif kind == "pong":
        return Pong()
    elif kind == "fed" and _are_natural(value, 2):
        return Fed(*value)
    raise _unexpected(line, "a rank")


def from_launcher(line: bytes) -> FromLauncher:
    """Return what perseusrun says; raise ValueError if it says nothing like that."""
    kind, value = _only_item(line, "perseusrun")
    if kind == "place" and isinstance(value, dict):
        epoch, commits, sync, fed = (value.get(key) for key in ("epoch", "commits", "sync", "fed"))
        if not (_is_natural(epoch) and _is_natural(commits) and isinstance(sync, bool)):
            raise _unexpected(line, "perseusrun")
        variables = value.get("environment")
        if isinstance(fed, bool) and isinstance(variables, dict):
            for item in variables.items():
                if not _is_variable(item):
                    raise _unexpected(line, "perseusrun")
            return Place(epoch, sync, commits, fed, variables)
    elif kind == "leave" and isinstance(value, str):
        return Leave(value)
    elif kind == "refuse" and isinstance(value, str):
        return Refuse(value)
    elif kind == "news" and isinstance(value, list) and len(value) == 3:
        at, change, feeding = value
        is_time = _is_natural(at) or (type(at) is float and isfinite(at))
        if is_time and _is_natural(change) and isinstance(feeding, bool):
            return News(float(at), change, feeding)
    elif kind == "feed" and _are_natural(value, 3) and value[1] < value[2]:
        return Feed(*value)
    elif kind == "ping":
        return Ping()
    raise _unexpected(line, "perseusrun")


def _only_item(line: bytes, speaker: str) -> tuple[str, Any]:
    try:
        ((kind, value),) = json.loads(line).items()
    except (ValueError, AttributeError, RecursionError):
        raise _unexpected(line, speaker) from None
    return kind, value


def _unexpected(line: bytes, speaker: str) -> ValueError:
    shown = repr(line[:60])[1:] + ("…" if len(line) > 60 else "")
    return ValueError(f"[elastic] {shown} is nothing that {speaker} says")


def _is_natural(value: Any) -> TypeGuard[int]:
    """Whether it is an integer that C's and other languages' types hold, too."""
    return type(value) is int and 0 <= value < 1 << 63


def _are_natural(value: Any, count: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == count and all(map(_is_natural, value))


def _is_variable(item: tuple[str, Any]) -> bool:
    """Whether it can be put into the environment."""
    name, value = item
    if not isinstance(value, str) or not name or "=" in name:
        return False
    try:
        return b"\0" not in (name + value).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
