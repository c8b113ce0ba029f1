"""Ranks with different amounts of data: whoever runs out joins, and the others go on.

    perseusrun -np 3 python pytorch_join.py

Rank r of n gets r + 1 parts of the digits. Without join the first rank to finish an epoch would
leave the others waiting for its gradients.
"""

import argparse

import torch
import torch.nn.functional as F
from pytorch_mnist import Net, load_digits
from torch.utils.data import DataLoader, Subset

import perseus.torch.horovod as hvd


def main():
    parser = argparse.ArgumentParser(description="Training on uneven data")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (20)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    training, test = load_digits()
    shares = hvd.size() * (hvd.size() + 1) // 2
    first = hvd.rank() * (hvd.rank() + 1) // 2
    mine = [i for i in range(len(training)) if first <= i % shares <= first + hvd.rank()]
    loader = DataLoader(Subset(training, mine), arguments.batch_size, shuffle=True)
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    print(f"rank {hvd.rank()} has {len(mine)} images, {len(loader)} steps an epoch")
    for _ in range(arguments.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        # All wait here; the rank that was last has taken every step.
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)  # its momentum, too
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
