"""A small CNN on handwritten digits in TensorFlow 2's own loop: a tape inside tf.function.

    perseusrun -np 2 python tensorflow2_mnist.py

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels).
"""

import mnist_data
import tensorflow as tf

import perseus.tensorflow.horovod as hvd


def build_model(side):
    """Two convolutions and two dense layers; images are (batch, side, side, 1)."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.InputLayer((side, side, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def loss_of(model, images, labels):
    """The mean over a batch."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
    return tf.reduce_mean(losses)


def train(model, data, arguments):
    """Prints an epoch's last loss on rank 0."""
    images, labels = mnist_data.share_of(data, hvd.rank(), hvd.size())
    steps = len(labels) // arguments.batch_size
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(len(labels), seed=arguments.seed)
    dataset = dataset.batch(arguments.batch_size, drop_remainder=True)
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = tf.keras.optimizers.schedules.CosineDecay(
        arguments.lr * hvd.size(), arguments.epochs * steps
    )
    optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        # After a step the optimizer has its variables, too, and they are rank 0's from here on.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for epoch in range(arguments.epochs):
        for step, (images, labels) in enumerate(dataset):
            loss = training_step(images, labels, epoch == 0 and step == 0)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}")


def test(model, data):
    """Mean loss and accuracy over the whole test set, each rank looking at its share."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in data)
    scores = model(images)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
    correct = tf.cast(tf.argmax(scores, 1) == labels, tf.float32)
    sums = tf.stack([tf.reduce_sum(losses), tf.reduce_sum(correct), float(len(labels))])
    loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").numpy()
    return loss / count, correct / count


def main():
    """Returns the weights."""
    arguments = mnist_data.parser("A small CNN on handwritten digits").parse_args()
    hvd.init()
    tf.random.set_seed(arguments.seed + hvd.rank())
    train_set, test_set = mnist_data.load(arguments.data_dir)
    model = build_model(side=train_set[0].shape[1])
    train(model, train_set, arguments)
    loss, accuracy = test(model, test_set)
    if hvd.rank() == 0:
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f}")
    hvd.shutdown()
    return model.get_weights()


if __name__ == "__main__":
    main()
