"""Trains a small CNN on handwritten digits with Keras, written for Horovod with one import swapped.

    perseusrun -np 2 python tensorflow_keras_mnist.py

The 1797 digits that ship with scikit-learn are used (8 x 8 pixels). Keras may run on PyTorch, too:
KERAS_BACKEND=torch, with `import perseus.keras as hvd`, which needs no TensorFlow.
"""

import argparse
import os

if os.environ.get("KERAS_BACKEND") == "torch":
    import perseus.keras as hvd
else:
    import perseus.tensorflow.horovod.keras as hvd

import keras
import numpy as np
from sklearn import datasets


def load_digits():
    """scikit-learn's digits: every fifth one is for testing."""
    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype("float32")[..., None]
    labels = digits.target.astype("int32")
    test = np.arange(len(labels)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def build_model():
    """Two convolutions and two dense layers; images are (batch, 8, 8, 1)."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description="A small CNN on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (15)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate of one rank (0.04)")
    parser.add_argument("--seed", type=int, default=42, help="for weights and shuffling (42)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    hvd.init()
    keras.utils.set_random_seed(arguments.seed + hvd.rank())
    (images, labels), test_set = load_digits()
    # Every rank trains on its share, of equal length, and all of them shuffle on their own.
    share = len(labels) // hvd.size()
    images, labels = (part[hvd.rank() :: hvd.size()][:share] for part in (images, labels))

    model = build_model()
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = arguments.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images,
        labels,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
            hvd.callbacks.LearningRateScheduleCallback(
                rate, lambda epoch: 1 - epoch / arguments.epochs, start_epoch=3
            ),
        ],
    )

    # All ranks have the same weights, so each looks at its share of the test set.
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test_set)
    loss, accuracy = model.evaluate(images, labels, verbose=0)
    sums = np.array([loss, accuracy, 1.0]) * len(labels)
    loss, accuracy, count = np.asarray(hvd.allreduce(sums, op=hvd.Sum, name="test"))
    if hvd.rank() == 0:
        print(f"test loss: {loss / count:.4f}")
        print(f"test accuracy: {accuracy / count:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
