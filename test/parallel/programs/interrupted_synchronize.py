"""Rank 0 is interrupted while it waits for the others; they come later, and all is well."""

import os
import signal
import threading
import time

import torch

import perseus.torch.horovod as hvd

hvd.init()
hvd.barrier()
if hvd.rank() == 0:
    handle = hvd.allreduce_async(torch.ones(4), name="late", op=hvd.Sum)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        hvd.synchronize(handle)
        raise SystemExit("synchronize was not interrupted")
    except KeyboardInterrupt:
        print(f"interrupted after {time.monotonic() - start:.2f} s", flush=True)
    assert 0.4 < time.monotonic() - start < 3.0
    assert not hvd.poll(handle)
else:
    # Longer than it takes rank 0 to be interrupted.
    time.sleep(2.0)
    handle = hvd.allreduce_async(torch.ones(4), name="late", op=hvd.Sum)
result = hvd.synchronize(handle)
assert result.tolist() == [float(hvd.size())] * 4, result
hvd.barrier()
print(f"rank {hvd.rank()} finished", flush=True)
hvd.shutdown()
