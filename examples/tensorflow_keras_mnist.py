"""Trains a small CNN on handwritten digits with Keras, written for Horovod with one import swapped.

    perseusrun -np 2 python tensorflow_keras_mnist.py

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels).
keras_torch_mnist.py has Keras on PyTorch, without TensorFlow.
"""

import keras
import mnist_data
import numpy as np

import perseus.tensorflow.horovod.keras as hvd


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


def main():
    arguments = mnist_data.parser("A small CNN on handwritten digits").parse_args()
    hvd.init()
    keras.utils.set_random_seed(arguments.seed + hvd.rank())
    train_set, test_set = mnist_data.load(arguments.data_dir)
    # Every rank trains on its share, and all of them shuffle on their own.
    images, labels = mnist_data.share_of(train_set, hvd.rank(), hvd.size())

    model = build_model(side=images.shape[1])
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
