"""Rank 0 leaves; what the others still wait for ends with an error that says so."""

import torch

import perseus.torch.horovod as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
hvd.barrier()
if rank == 0:
    hvd.shutdown()
else:
    try:
        hvd.allreduce(torch.ones(3), name="left alone")
        raise SystemExit("an allreduce without rank 0 succeeded")
    except hvd.HorovodInternalError as error:
        assert "Horovod has been shut down" in str(error), error
        assert hvd.rank() == rank and hvd.size() == size
print(f"rank {rank} finished", flush=True)
