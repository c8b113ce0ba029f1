"""Data + model parallel training with MXNet: the last layer of a classifier is sharded over ranks.

    perseusrun -np 2 python mxnet_sharded_classifier.py

As in face recognition, where the classes are too many for one rank. Every rank owns a part of the
classes and sees everybody's features; what softmax needs of the other parts comes from the KVStore:
the largest logit by a push with Max, sums by pushes with Sum. Everything before the last layer is
replicated, with batch normalisation over all ranks, and averaged. The result is that of one process
on the global batch.
"""

import sys

import mnist_data
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd

CLASSES, FEATURES = 10, 64


def build_backbone(batch_norm):
    """From images (batch, 1, side, side) to features (batch, 64). batch_norm: makes a layer."""
    layers = gluon.nn
    backbone = layers.HybridSequential()
    backbone.add(
        layers.Conv2D(24, 3, padding=1, use_bias=False),
        batch_norm(),
        layers.Activation("relu"),
        layers.MaxPool2D(),
        layers.Dense(FEATURES, use_bias=False),
        batch_norm(),
    )
    backbone.initialize(mx.init.Xavier())
    backbone.hybridize()
    return backbone


class ShardedClassifier:
    """This rank's classes. All ranks have batches of one size.

    weight: (CLASSES, FEATURES), the same on all ranks; what is not this rank's is not kept.
    """

    def __init__(self, store, weight, optimizer):
        self.store = store
        mine = np.array_split(np.arange(CLASSES), hvd.size())[hvd.rank()]
        self.first = int(mine[0])
        self.shard = weight[self.first : int(mine[-1]) + 1].copy()
        self._update = mx.optimizer.get_updater(optimizer)
        self._known = set()

    def _combine(self, key, array, op):
        """In place: what the pushes of all ranks make."""
        if key not in self._known:
            self.store.init(key, array, param_only=True)
            self._known.add(key)
        self.store.push(key, array, op=op)
        self.store.pull(key, array)
        return array

    def step(self, features, labels):
        """Mean loss over all ranks' batches, and the sum of losses' gradient by `features`.

        features: (batch, FEATURES), labels: (batch,) of this rank. Updates the shard.
        """
        everyone = hvd.allgather(features, name="features")
        labels = hvd.allgather(labels, name="labels")
        logits = mx.nd.dot(everyone, self.shard, transpose_b=True)
        highest = self._combine("highest", logits.max(axis=1), hvd.PerseusOp.Max)
        exponentials = (logits - highest.expand_dims(1)).exp()
        total = self._combine("total", exponentials.sum(axis=1), hvd.PerseusOp.Sum)
        # Rows of other ranks' classes are all 0.
        targets = mx.nd.one_hot(labels - self.first, len(self.shard))
        wanted = self._combine("wanted", (logits * targets).sum(axis=1), hvd.PerseusOp.Sum)
        gradient = exponentials / total.expand_dims(1) - targets
        # Every rank knows its classes' part of the gradient of everybody's features.
        own = hvd.reducescatter(mx.nd.dot(gradient, self.shard), op=hvd.Sum, name="own")
        by_shard = mx.nd.dot(gradient, everyone, transpose_a=True)
        self._update(0, by_shard / len(labels), self.shard)
        return (total.log() + highest - wanted).mean(), own

    def classify(self, features):
        """The class of each row; every rank passes the same features."""
        scores = mx.nd.dot(features, self.shard, transpose_b=True)
        best = mx.nd.stack(scores.max(axis=1), scores.argmax(axis=1) + self.first)
        best = hvd.allgather(best.expand_dims(0), name="best")
        winner = best[:, 0].argmax(axis=0)
        return mx.nd.pick(best[:, 1], winner, axis=0)


class ShardedModel:
    """The replicated backbone, this rank's classes, and their optimizers."""

    def __init__(self, learning_rate):
        options = {"learning_rate": learning_rate, "momentum": 0.9}
        self.backbone = build_backbone(lambda: gluon.contrib.nn.PerseusSyncBatchNorm(comm_scope=1))
        hvd.broadcast_parameters(self.backbone.collect_params(), root_rank=0)
        self.trainer = hvd.DistributedTrainer(self.backbone.collect_params(), "sgd", options)
        weight = mx.nd.random.normal(scale=0.1, shape=(CLASSES, FEATURES))
        self.classifier = ShardedClassifier(
            hvd.create("dist_sync_perseus"),
            hvd.broadcast(weight, root_rank=0, name="classifier"),
            mx.optimizer.create("sgd", **options),
        )

    def step(self, images, labels):
        """One step; returns the mean loss over all ranks."""
        with autograd.record():
            features = self.backbone(images)
        loss, gradient = self.classifier.step(features.detach(), labels)
        features.backward(gradient)
        self.trainer.step(len(images))
        return loss


def arrays_of(images, labels):
    """As gluon's layers take them, the channel in front."""
    return mx.nd.array(images.transpose(0, 3, 1, 2)), mx.nd.array(labels)


def main():
    """Returns the replicated weights."""
    arguments = mnist_data.parser("A classifier sharded over ranks").parse_args()
    hvd.init()
    if hvd.size() > CLASSES:
        sys.exit(f"{hvd.size()} ranks for {CLASSES} classes: start {CLASSES} ranks or fewer")
    mx.random.seed(arguments.seed + hvd.rank())
    training, test = mnist_data.load(arguments.data_dir)
    images, labels = mnist_data.share_of(training, hvd.rank(), hvd.size())
    model = ShardedModel(arguments.lr)
    steps = len(labels) // arguments.batch_size
    order = np.random.default_rng(arguments.seed)
    for epoch in range(arguments.epochs):
        chosen = order.permutation(len(labels))[: steps * arguments.batch_size]
        for batch in np.split(chosen, steps):
            loss = model.step(*arrays_of(images[batch], labels[batch]))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.asscalar():.4f}")
    images, labels = arrays_of(*test)
    accuracy = (model.classifier.classify(model.backbone(images)) == labels).mean().asscalar()
    if hvd.rank() == 0:
        print(f"{len(model.classifier.shard)} of {CLASSES} classes on rank 0")
        print(f"test accuracy: {accuracy:.4f}")
    parameters = model.backbone.collect_params().values()
    weights = [parameter.data().asnumpy() for parameter in parameters]
    hvd.shutdown()
    return weights


if __name__ == "__main__":
    main()
