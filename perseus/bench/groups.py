"""Process groups on Perseus beside that on gloo, and DistributedDataParallel on either of them.

The group on gloo is the default one (peers.py). One thread per rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perseus.bench.codecs import Codec
from perseus.torch.distributed import register

USUAL_BUCKET = 25 << 20  # DDP's own, behind a first one of 1 MiB
BUCKETS = [1 << 20, USUAL_BUCKET, 200 << 20]
_TIMEOUT = timedelta(seconds=120)


def on_perseus(codec: Codec | None = None) -> dist.ProcessGroup:
    """Return a new group of all ranks, whose gradients travel through the codec, if there is one.

    A collective.
    """
    register()
    with _variables({} if codec is None else codec.variables()):
        made: dist.ProcessGroup = dist.new_group(backend="perseus", timeout=_TIMEOUT)
    return made


def wrap(
    module: nn.Module, bucket: int, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Return the module under DDP with buckets of this size in bytes.

    group: None = that on gloo. The parameters must be equal on all ranks.
    """
    size: dict[str, Any] = {} if bucket == USUAL_BUCKET else {"bucket_cap_mb": bucket / (1 << 20)}
    return DistributedDataParallel(module, process_group=group, init_sync=False, **size)


@contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    """Set variables, which a group reads when it is made, within the context."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
