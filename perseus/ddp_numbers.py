"""The variables of torch's launcher that are known before ranks have met: the numbers of a rank.

Many scripts and libraries make a process group only if they find RANK. Under perseusrun, mpirun or
srun they would find none, and train in every rank as if that were alone. The address of rank 0
comes with the first process group. Belongs to the main thread.
"""

from __future__ import annotations

import os
from importlib import import_module
from urllib.parse import parse_qsl, urlsplit

HOST = "GROUP_RANK"  # torchrun's name for the number of the host, by which Lightning counts ranks

_shown: dict[str, str] = {}  # what is set here
_earlier: dict[str, str] = {}  # what was set before


def show() -> None:
    """Set them, unless a launcher of torch has, or this process is no rank of several."""
    if "RANK" in os.environ:
        return
    try:
        own = import_module("perseus.run.bootstrap.identity").identify()
    except (ImportError, ValueError):  # a process group, or hvd.init(), says what is wrong
        return
    if own.size == 1 or own.local_size == 0:
        return
    names = import_module("perseus.run.bootstrap.torch_round").IDENTITY
    values = map(str, (own.rank, own.size, own.local_rank, own.local_size))
    _shown.update(zip(names, values, strict=True))
    if own.cross_size or own.local_size == own.size:
        _shown[HOST] = str(own.cross_rank)
    _earlier.update((name, os.environ[name]) for name in _shown if name in os.environ)
    os.environ.update(_shown)


def leave() -> bool:
    """Leave them set for good. Return whether they are set here."""
    are_set = bool(_shown)
    _shown.clear()
    return are_set


def hide() -> None:
    """Take them back, where the script has not changed them."""
    for name, value in _shown.items():
        if os.environ.get(name) == value:
            del os.environ[name]
            if name in _earlier:
                os.environ[name] = _earlier[name]
    _shown.clear()


def are_given(url: str) -> bool:
    """Whether the URL of a rendezvous has a rank and a size that the script was not shown here."""
    given = dict(parse_qsl(urlsplit(url).query))
    known = _shown.get("RANK"), _shown.get("WORLD_SIZE")
    return "rank" in given and (given["rank"], given.get("world_size")) != known
