"""Rank 0 is interrupted while it waits for the others; they come later, and all is well."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch

import perseus.torch.horovod as hvd

hvd.init()
interrupted = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0), "interrupted")
if hvd.rank() == 0:
    handle = hvd.allreduce_async(torch.ones(4), name="late", op=hvd.Sum)
    start = time.monotonic()
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        hvd.synchronize(handle)
        raise SystemExit("synchronize was not interrupted")
    except KeyboardInterrupt:
        print(f"interrupted after {time.monotonic() - start:.2f} s", flush=True)
    assert time.monotonic() - start >= 0.5
    assert not hvd.poll(handle)
    interrupted.touch()
else:
    deadline = time.monotonic() + 60
    while not interrupted.exists():
        assert time.monotonic() < deadline, "rank 0 was not interrupted"
        time.sleep(0.02)
    handle = hvd.allreduce_async(torch.ones(4), name="late", op=hvd.Sum)
result = hvd.synchronize(handle)
assert result.tolist() == [float(hvd.size())] * 4, result
hvd.barrier()
print(f"rank {hvd.rank()} finished", flush=True)
hvd.shutdown()
