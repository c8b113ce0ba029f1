"""Perseus: data-parallel training made faster on ordinary networks, with one import swapped.

    import perseus.torch as hvd

Importing this package defines names and loads no framework and no native code. A script for
torch.distributed that has no other import of Perseus runs on it from then on (perseus.ddp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus import ddp as _ddp
from perseus.version import __version__

if TYPE_CHECKING:
    from perseus.arrays import allreduce as allreduce
    from perseus.basics import flush_residuals as flush_residuals

__all__ = ["__version__", "allreduce", "flush_residuals", "run", "stats"]

# What a script imports by itself.
_FACES = ("arrays", "compat", "elastic", "keras", "mxnet", "tensorflow", "torch")

_ddp.watch()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FACES})


def __getattr__(name: str) -> Any:
    if name == "run":  # this package is callable: perseus.run(func, num_proc=2)
        from importlib import import_module

        return import_module("perseus.run")
    if name == "flush_residuals":
        from perseus.basics import flush_residuals

        return flush_residuals
    if name == "allreduce":
        from perseus.arrays import allreduce

        return allreduce
    raise AttributeError(f"module 'perseus' has no attribute {name!r}")


def stats() -> dict[str, int]:
    """Counters of this rank since init(): bytes per transport, rounds, buckets, waits.

    Keys: shm_bytes_sent, shm_bytes_received, tcp_bytes_sent, tcp_bytes_received (bytes, headers
    included), rounds (negotiation rounds), buckets (fused executions), operations, sleeps (times a
    thread slept waiting for peers), staging_bytes (memory held beyond the tensors), messages (sent
    to negotiate).
    Raises ValueError before init().
    """
    from perseus import basics

    return basics.stats()
