"""The last rank is stopped until the others have given it up as lost; then all go on together."""

import os
import signal

import torch

import perseus.torch.horovod as hvd

os.environ["GLOO_TIMEOUT_SECONDS"] = "4"
hvd.init()
rank, size = hvd.rank(), hvd.size()
last = size - 1
pids = hvd.allgather_object(os.getpid())
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
errors = []


@hvd.elastic.run
def train(state):
    try:
        while state.step < 4:
            if not errors and state.step == 2 and rank == last:
                os.kill(os.getpid(), signal.SIGSTOP)
            total = hvd.allreduce(torch.tensor([2.0**rank]), op=hvd.Sum, name=f"{state.step}")
            assert total.item() == 2.0**size - 1, total
            state.step += 1
            state.commit()
    except hvd.HorovodInternalError as error:
        errors.append((state.step, str(error)))
        os.environ["GLOO_TIMEOUT_SECONDS"] = "60"
        if rank == 0:
            os.kill(pids[last], signal.SIGCONT)
        raise


train(state)
assert [step for step, _ in errors] == [2], errors
assert f"no sign of life from rank {last}" in errors[0][1], errors
print(f"rank {rank} finished", flush=True)
hvd.shutdown()
