"""A small CNN on handwritten digits with gluon: a DistributedTrainer in the loop that gluon has.

    perseusrun -np 2 python mxnet_mnist.py

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels).
"""

import mnist_data
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd


def build_model():
    """Two convolutions and two dense layers; images are (batch, 1, side, side)."""
    layers = gluon.nn
    model = layers.HybridSequential()
    model.add(
        layers.Conv2D(16, 3, padding=1, activation="relu"),
        layers.MaxPool2D(),
        layers.Conv2D(32, 3, padding=1, activation="relu"),
        layers.MaxPool2D(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    )
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def arrays_of(images, labels):
    """As gluon's layers take them, the channel in front."""
    return mx.nd.array(images.transpose(0, 3, 1, 2)), mx.nd.array(labels)


def train(model, data, arguments):
    """Prints an epoch's last loss on rank 0."""
    images, labels = mnist_data.share_of(data, hvd.rank(), hvd.size())
    steps = len(labels) // arguments.batch_size
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = mx.lr_scheduler.CosineScheduler(
        arguments.epochs * steps, base_lr=arguments.lr * hvd.size()
    )
    parameters = model.collect_params()
    # The layers' shapes come with the first batch, and the root's weights right after that.
    hvd.broadcast_parameters(parameters, root_rank=0)
    options = {"learning_rate": rate.base_lr, "lr_scheduler": rate, "momentum": 0.9}
    trainer = hvd.DistributedTrainer(parameters, "sgd", options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.default_rng(arguments.seed)
    for epoch in range(arguments.epochs):
        for batch in np.array_split(order.permutation(len(labels)), steps):
            inputs, targets = arrays_of(images[batch], labels[batch])
            with autograd.record():
                losses = loss_of(model(inputs), targets)
            losses.backward()
            trainer.step(len(batch))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {losses.mean().asscalar():.4f}")


def test(model, data):
    """Mean loss and accuracy over the whole test set, each rank looking at its share."""
    images, labels = arrays_of(*(array[hvd.rank() :: hvd.size()] for array in data))
    scores = model(images)
    losses = gluon.loss.SoftmaxCrossEntropyLoss()(scores, labels)
    correct = scores.argmax(axis=1) == labels
    sums = mx.nd.concat(losses.sum(), correct.sum(), mx.nd.array([len(labels)]), dim=0)
    loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").asnumpy()
    return loss / count, correct / count


def main():
    """Returns the weights."""
    arguments = mnist_data.parser("A small CNN on handwritten digits").parse_args()
    hvd.init()
    mx.random.seed(arguments.seed + hvd.rank())
    train_set, test_set = mnist_data.load(arguments.data_dir)
    model = build_model()
    train(model, train_set, arguments)
    loss, accuracy = test(model, test_set)
    if hvd.rank() == 0:
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f}")
    weights = [parameter.data().asnumpy() for parameter in model.collect_params().values()]
    hvd.shutdown()
    return weights


if __name__ == "__main__":
    main()
