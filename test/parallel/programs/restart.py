"""init, shutdown, init again, three times over; handles that were open keep their outcome."""

import torch

import perseus.torch.horovod as hvd

for world in range(3):
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + world)]), op=hvd.Sum)
    assert total.item() == sum(rank + world for rank in range(hvd.size()))
    size = hvd.size()
    if hvd.rank() == 0 and size > 1:
        never = hvd.allreduce_async(torch.ones(2), name="never")
    done = hvd.allreduce_async(torch.ones(2), name="done", op=hvd.Sum)
    hvd.barrier()
    first = hvd.rank() == 0
    hvd.shutdown()
    assert not hvd.is_initialized()
    try:
        result = hvd.synchronize(done)
        assert result.tolist() == [float(size)] * 2
    except hvd.HorovodInternalError as error:
        raise SystemExit(f"'done' was finished on all ranks, got {error}") from error
    if first and size > 1:
        try:
            hvd.synchronize(never)
            raise SystemExit("'never' cannot have succeeded")
        except hvd.HorovodInternalError as error:
            assert "Horovod has been shut down" in str(error), error
    for call in (hvd.rank, hvd.size, hvd.local_rank):
        try:
            call()
            raise SystemExit("who am I after shutdown?")
        except ValueError as error:
            assert "Horovod has not been initialized; use hvd.init()." in str(error), error
    try:
        hvd.allreduce(torch.ones(1))
        raise SystemExit("a collective after shutdown")
    except hvd.HorovodInternalError as error:
        assert "Horovod has been shut down" in str(error), error
print("finished", flush=True)
