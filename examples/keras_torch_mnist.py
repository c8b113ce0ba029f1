"""Trains a small CNN on handwritten digits with Keras 3 on PyTorch; TensorFlow is not needed.

    perseusrun -np 2 python keras_torch_mnist.py

What is Keras' stays as in tensorflow_keras_mnist.py, data come from PyTorch's loaders. Without
--data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels).
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import mnist_data
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import perseus.keras as hvd


def build_model(side):
    """Two convolutions and two dense layers; images are (batch, side, side, 1)."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((side, side, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


class NewOrder(keras.callbacks.Callback):
    """Shuffles differently in every epoch, equally on all ranks."""

    def __init__(self, sampler):
        super().__init__()
        self.sampler = sampler

    def on_epoch_begin(self, epoch, logs=None):
        """Called by fit."""
        self.sampler.set_epoch(epoch)


def main():
    """Returns the weights."""
    arguments = mnist_data.parser("A small CNN on handwritten digits").parse_args()
    hvd.init()
    keras.utils.set_random_seed(arguments.seed + hvd.rank())
    train_set, test_set = mnist_data.load(arguments.data_dir)
    train_set = TensorDataset(*map(torch.from_numpy, train_set))
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=arguments.seed)
    loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=sampler)

    model = build_model(side=train_set.tensors[0].shape[1])
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = arguments.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        loader,
        epochs=arguments.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
            hvd.callbacks.LearningRateScheduleCallback(
                rate, lambda epoch: 1 - epoch / arguments.epochs, start_epoch=3
            ),
            NewOrder(sampler),
        ],
    )

    # All ranks have the same weights, so each looks at its share of the test set.
    images, labels = (array[hvd.rank() :: hvd.size()] for array in test_set)
    loss, accuracy = model.evaluate(images, labels, verbose=0)
    sums = torch.tensor([loss, accuracy, 1.0]) * len(labels)
    loss, accuracy, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    if hvd.rank() == 0:
        print(f"test loss: {loss / count:.4f}")
        print(f"test accuracy: {accuracy / count:.4f}")
    hvd.shutdown()
    return model.get_weights()


if __name__ == "__main__":
    main()
