"""A small CNN on handwritten digits in the style of TensorFlow 1: a graph and a monitored session.

    perseusrun -np 2 python tensorflow_mnist.py

Runs on every TensorFlow from 2.15 on, by tf.compat.v1. Without --data-dir the 1797 digits that
ship with scikit-learn are used (8 x 8 pixels).
"""

import mnist_data
import tensorflow as tf

import perseus.tensorflow.horovod as hvd

v1 = tf.compat.v1


def network(images):
    """Two convolutions and two dense layers: (batch, side, side, 1) to scores (batch, 10)."""

    def weights(name, *shape):
        initializer = v1.initializers.variance_scaling()
        return v1.get_variable(name, shape, initializer=initializer, use_resource=True)

    def biases(name, width):
        return v1.get_variable(name, [width], initializer=v1.initializers.zeros, use_resource=True)

    x = images
    for name, inputs, outputs in (("conv1", 1, 16), ("conv2", 16, 32)):
        x = tf.nn.conv2d(x, weights(f"{name}/kernel", 3, 3, inputs, outputs), 1, "SAME")
        x = tf.nn.max_pool2d(tf.nn.relu(x + biases(f"{name}/bias", outputs)), 2, 2, "VALID")
    width = x.shape[1] * x.shape[2] * x.shape[3]
    x = tf.reshape(x, [-1, width]) @ weights("fc1/kernel", width, 64) + biases("fc1/bias", 64)
    return tf.nn.relu(x) @ weights("fc2/kernel", 64, 10) + biases("fc2/bias", 10)


def train_op_of(loss, rate, steps):
    """Momentum SGD on all ranks' gradients, the learning rate falling to zero."""
    global_step = v1.train.get_or_create_global_step()
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = v1.train.polynomial_decay(rate * hvd.size(), global_step, steps, 0.0)
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(rate, 0.9))
    return optimizer.minimize(loss, global_step)


class AtTheEnd(v1.train.SessionRunHook):
    """Fetches tensors when training is over; result: their values."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.result = None

    def end(self, session):
        """Called before the session is closed."""
        self.result = session.run(self.tensors)


def build(train_set, test_set, arguments):
    """The graph: (training operation, tensors that training ends with, hooks)."""
    images, labels = mnist_data.share_of(train_set, hvd.rank(), hvd.size())
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
    dataset = dataset.shuffle(len(labels), seed=arguments.seed).batch(arguments.batch_size)
    batch_images, batch_labels = v1.data.make_one_shot_iterator(dataset).get_next()
    with v1.variable_scope("network"):
        scores = network(batch_images)
    loss = v1.losses.sparse_softmax_cross_entropy(batch_labels, scores)
    steps_per_epoch = len(labels) // arguments.batch_size
    steps = arguments.epochs * steps_per_epoch
    train_op = train_op_of(loss, arguments.lr, steps)

    # All ranks have the same weights, so each looks at its share of the test set.
    images, labels = (array[hvd.rank() :: hvd.size()] for array in test_set)
    with v1.variable_scope("network", reuse=True):
        scores = network(tf.constant(images))
    correct = tf.cast(tf.equal(tf.argmax(scores, 1, tf.int32), labels), tf.float32)
    sums = tf.stack([tf.reduce_sum(correct), float(len(labels))])
    ends = AtTheEnd([hvd.allreduce(sums, op=hvd.Sum, name="test"), v1.trainable_variables()])

    hooks = [
        # Variables that rank 0 initialised, or restored from a checkpoint, go to everybody.
        hvd.BroadcastGlobalVariablesHook(0),
        v1.train.StopAtStepHook(last_step=steps),
        ends,
    ]
    if hvd.rank() == 0:
        step = v1.train.get_global_step()
        hooks.append(v1.train.LoggingTensorHook({"step": step, "loss": loss}, steps_per_epoch))
    return train_op, ends, hooks


def main():
    """Returns the weights."""
    parser = mnist_data.parser("A small CNN on handwritten digits")
    parser.add_argument("--checkpoint-dir", help="where rank 0 saves, and goes on from")
    arguments = parser.parse_args()
    v1.logging.set_verbosity(v1.logging.INFO)
    hvd.init()
    train_set, test_set = mnist_data.load(arguments.data_dir)
    with tf.Graph().as_default():
        v1.set_random_seed(arguments.seed + hvd.rank())
        train_op, ends, hooks = build(train_set, test_set, arguments)
        # Only rank 0 saves: others would overwrite what it writes.
        directory = arguments.checkpoint_dir if hvd.rank() == 0 else None
        with v1.train.MonitoredTrainingSession(checkpoint_dir=directory, hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
    (correct, count), weights = ends.result
    if hvd.rank() == 0:
        print(f"test accuracy: {correct / count:.4f}")
    hvd.shutdown()
    return weights


if __name__ == "__main__":
    main()
