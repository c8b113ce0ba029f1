"""Data + model parallel training: the last layer of a classifier is sharded over a group of ranks.

    perseusrun -np 4 python pytorch_sharded_classifier.py --shards 2

As in face recognition, where the classes are too many for one rank. Ranks are laid out in rows of
--shards: the ranks of a row own a part of the classes each and see each other's features; the ranks
of a column own the same part and average its gradient. Everything before the last layer is
replicated and averaged over all ranks. The result is that of one process on the global batch.
"""

import argparse

import torch
import torch.nn.functional as F
from pytorch_mnist import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import perseus.torch.horovod as hvd

CLASSES, FEATURES = 10, 64


class Backbone(nn.Module):
    """From images (batch, 1, 8, 8) to features (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 4 * 4, FEATURES)

    def forward(self, x):
        return F.relu(self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)))


class ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy over a group's batches, without any rank ever seeing all logits.

    features: (batch, features) of this rank, the same batch size on all ranks of the group.
    weight: (classes of this rank, features). labels: (batch,). first: this rank's first class.
    """

    @staticmethod
    def forward(ctx, features, weight, labels, first, group):  # noqa: PLR0917
        features = hvd.allgather(features, process_set=group)
        labels = hvd.allgather(labels, process_set=group)
        logits = features @ weight.T
        highest = hvd.allreduce(logits.max(dim=1).values, op=hvd.Max, process_set=group)
        exponentials = (logits - highest[:, None]).exp()
        total = hvd.allreduce(exponentials.sum(dim=1), op=hvd.Sum, process_set=group)
        rows = ((labels >= first) & (labels < first + len(weight))).nonzero()[:, 0]
        columns = labels[rows] - first
        wanted = torch.zeros_like(total)
        wanted[rows] = logits[rows, columns]
        wanted = hvd.allreduce(wanted, op=hvd.Sum, process_set=group)
        gradient = exponentials / total[:, None]
        gradient[rows, columns] -= 1
        ctx.save_for_backward(features, weight, gradient / len(labels))
        ctx.group = group
        return (total.log() + highest - wanted).mean()

    @staticmethod
    def backward(ctx, grad):
        features, weight, gradient = ctx.saved_tensors
        gradient = gradient * grad
        # Every rank of the group knows its classes' part of the gradient of everybody's features.
        # The optimizer is going to average over ranks what is a sum over the group's.
        own = hvd.reducescatter(gradient @ weight, op=hvd.Sum, process_set=ctx.group)
        return own * ctx.group.size(), gradient.T @ features, None, None, None


class ShardedModel:
    """The replicated backbone, this rank's shard of the classifier, and their optimizers."""

    def __init__(self, shards: int, lr: float) -> None:
        if shards == hvd.size():
            self.row, self.column = hvd.global_process_set, None
        else:
            self.row, self.column = hvd.GroupComm.grid(shards)
        self.backbone = Backbone()
        hvd.broadcast_parameters(self.backbone.state_dict(), root_rank=0)
        classifier = hvd.broadcast(nn.Linear(FEATURES, CLASSES, bias=False).weight.detach(), 0)
        parts = torch.arange(CLASSES).tensor_split(shards)
        mine = parts[self.row.rank()]
        self.first = int(mine[0])
        self.shard = nn.Parameter(classifier[mine].clone())
        self.optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(self.backbone.parameters(), lr, momentum=0.9),
                named_parameters=self.backbone.named_parameters(),
            )
        ]
        shard_optimizer = torch.optim.SGD([self.shard], lr, momentum=0.9)
        if self.column is not None:
            shard_optimizer = hvd.DistributedOptimizer(
                shard_optimizer,
                named_parameters=[("shard", self.shard)],
                process_set=self.column,
            )
        self.optimizers.append(shard_optimizer)

    def step(self, images, labels):
        """One step; returns the mean loss over this rank's row."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        features = self.backbone(images)
        loss = ShardedCrossEntropy.apply(features, self.shard, labels, self.first, self.row)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def classify(self, images):
        """The class of each image; every rank of the row passes the same images."""
        with torch.no_grad():
            scores, found = (self.backbone(images) @ self.shard.T).max(dim=1)
        everybody = hvd.allgather(
            torch.stack([scores, found + self.first])[None], process_set=self.row
        )
        best = everybody[:, 0].argmax(dim=0)
        return everybody[best, 1, torch.arange(len(images))].long()


def main():
    parser = argparse.ArgumentParser(description="A classifier sharded over a group of ranks")
    parser.add_argument("--shards", type=int, help="ranks that share a classifier (all)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (12)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (0.05)")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    training, test = load_digits()
    sampler = DistributedSampler(training, hvd.size(), hvd.rank(), seed=42)
    loader = DataLoader(training, arguments.batch_size, sampler=sampler, drop_last=True)
    shards = arguments.shards or hvd.size()
    if shards > CLASSES:
        parser.error(f"{shards} shards of {CLASSES} classes: give --shards {CLASSES} or fewer")
    model = ShardedModel(shards, arguments.lr)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = model.step(images, labels)
    loss = hvd.allreduce(loss)
    images, labels = test.tensors
    accuracy = (model.classify(images) == labels).float().mean()
    if hvd.rank() == 0:
        print(f"{len(model.shard)} of {CLASSES} classes on rank 0, last loss {loss:.3f}")
        print(f"test accuracy: {accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
