"""A training script as Horovod's users write them, worker processes and all; knows no Perseus.

Ends with an error unless all ranks hold what one process would have trained on all the data.
"""

import argparse

import horovod
import horovod.torch as hvd
import torch
import torch.utils.data.distributed
from horovod.common.util import extension_available, gloo_built
from horovod.torch.mpi_ops import Average

ROWS = 24
EPOCHS = 3


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = torch.tensor([index / ROWS, (index % 5) / 5, 1.0 - index / ROWS])
        return x, torch.tensor([3.0 * x[0] - 2.0 * x[1] + 0.5])


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def trained_alone(state, rate):
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    x, y = (torch.stack(part) for part in zip(*(Rows()[i] for i in range(ROWS)), strict=True))
    losses = [step(model, optimizer, x, y) for _ in range(EPOCHS)]
    return model.state_dict(), losses[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    assert extension_available("torch") and gloo_built()
    hvd.init()
    torch.manual_seed(100 + hvd.rank())
    torch.set_num_threads(1)
    sampler = torch.utils.data.distributed.DistributedSampler(
        Rows(), num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        Rows(),
        batch_size=ROWS // hvd.size(),
        sampler=sampler,
        num_workers=args.workers,
        multiprocessing_context="forkserver" if args.workers else None,
        persistent_workers=args.workers > 0,
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=Average,
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = step(model, optimizer, x, y)
    loss = hvd.allreduce(torch.tensor(loss), name="avg_loss").item()

    expected, expected_loss = trained_alone(start, args.rate)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-6), (name, value, expected[name])
        everywhere = hvd.allgather(value.reshape(1, -1))
        assert torch.equal(everywhere, everywhere[:1].expand(hvd.size(), -1))
    assert abs(loss - expected_loss) < 1e-6, (loss, expected_loss)
    print(f"rank {hvd.rank()} of {hvd.size()} finished, horovod {horovod.__version__}", flush=True)


if __name__ == "__main__":
    main()
