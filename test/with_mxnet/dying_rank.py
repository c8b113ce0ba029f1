"""Rank 1 is killed; rank 0 writes which errors it gets.

    perseusrun -np 2 python dying_rank.py FILE

What the launcher sees as rank 1 only waits for that file: else it would end rank 0, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

FOUND = Path(sys.argv[1])
RANK = int(os.environ["HOROVOD_RANK"])


def main() -> None:
    import mxnet as mx

    import perseus.mxnet as hvd

    hvd.init()
    array = mx.nd.full((1000,), hvd.rank() + 1.0)
    hvd.allreduce_(array, op=hvd.Sum, name="gradient")
    assert array.asnumpy().tolist() == [3.0] * 1000
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lines = []
    hvd.allreduce_(array, name="gradient")
    array *= 2
    for wait in (array.wait_to_read, lambda: hvd.allgather(mx.nd.ones((3,)), "gathered")):
        try:
            wait()
        except mx.base.MXNetError as error:
            assert "lost rank 1" in str(error), error
            lines.append("MXNetError")
    FOUND.with_suffix(".part").write_text("\n".join(lines), encoding="utf-8")
    FOUND.with_suffix(".part").rename(FOUND)


if RANK == 1:
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        until = time.monotonic() + 60
        while not FOUND.exists() and time.monotonic() < until:
            time.sleep(0.05)
        sys.exit(0)
main()
