"""The last rank comes to the new world only after the others have given up waiting once.

perseusrun -np 3 python elastic_late.py DIRECTORY
"""

import os
import sys
import time
from pathlib import Path

import torch

import perseus.torch.horovod as hvd
from perseus import basics

given_up = Path(sys.argv[1], "given up")
hvd.init()
rank, size = hvd.rank(), hvd.size()
late = rank == size - 1
init = basics.init
failures = []


def impatient_init(**arguments):
    """Wait for a second; after one failure, as long as it takes."""
    os.environ["HOROVOD_START_TIMEOUT"] = "60" if late or failures else "1"
    try:
        init(**arguments)
    except hvd.HorovodInternalError as error:
        failures.append(str(error))
        given_up.touch()
        raise


basics.init = impatient_init
state = hvd.elastic.TorchState(worlds=[])


@hvd.elastic.run
def train(state):
    state.worlds.append(basics._world.epoch)
    if len(state.worlds) == 1:
        hvd.barrier()
        state.commit()
        if rank == 0:
            raise hvd.HorovodInternalError("injected")
        deadline = time.monotonic() + 60
        while late and not given_up.exists():
            assert time.monotonic() < deadline, "nobody gave up"
            time.sleep(0.02)
    return hvd.allreduce(torch.tensor([float(2**rank)]), op=hvd.Sum).item()


assert train(state) == 2.0**size - 1
assert state.worlds == [1, 3], state.worlds  # epoch 1 never became a world
assert len(failures) == 1, failures
assert not late or "has given up this start (world 1)" in failures[0], failures
print(f"rank {rank} finished", flush=True)
hvd.shutdown()
