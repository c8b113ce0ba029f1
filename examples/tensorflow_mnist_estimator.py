"""A small CNN on handwritten digits with tf.estimator, for TensorFlow 2.15, the last that has it.

    perseusrun -np 2 python tensorflow_mnist_estimator.py

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels).
"""

import sys

import mnist_data
import tensorflow as tf
from tensorflow_mnist import network, train_op_of

import perseus.tensorflow.horovod as hvd

v1 = tf.compat.v1


def model_fn(features, labels, mode, params):
    """What tf.estimator asks for; features: images (batch, side, side, 1)."""
    scores = network(features)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, scores)
    if mode == tf.estimator.ModeKeys.TRAIN:
        train_op = train_op_of(loss, params["rate"], params["steps"])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    metrics = {"accuracy": v1.metrics.accuracy(labels, tf.argmax(scores, 1))}
    return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)


def main():
    """Returns the weights."""
    parser = mnist_data.parser("A small CNN on handwritten digits")
    parser.add_argument("--model-dir", help="where rank 0 saves, and goes on from")
    arguments = parser.parse_args()
    if not hasattr(tf, "estimator"):
        sys.exit(
            f"TensorFlow {tf.__version__} has no tf.estimator; the last one with it is 2.15. Use "
            "tensorflow_mnist.py (hooks and a monitored session), tensorflow_keras_mnist.py (fit) "
            "or tensorflow2_mnist.py (a loop of one's own)."
        )
    v1.logging.set_verbosity(v1.logging.INFO)
    hvd.init()
    train_set, test_set = mnist_data.load(arguments.data_dir)
    images, labels = mnist_data.share_of(train_set, hvd.rank(), hvd.size())
    steps = arguments.epochs * (len(labels) // arguments.batch_size)

    def training_batches():
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
        dataset = dataset.shuffle(len(labels), seed=arguments.seed)
        return dataset.batch(arguments.batch_size)

    def test_batches():
        return tf.data.Dataset.from_tensor_slices(test_set).batch(100)

    # Only rank 0 saves where it is asked to: others would overwrite what it writes.
    model_dir = arguments.model_dir if hvd.rank() == 0 else None
    classifier = tf.estimator.Estimator(
        model_fn,
        model_dir=model_dir,
        config=tf.estimator.RunConfig(
            tf_random_seed=arguments.seed + hvd.rank(), log_step_count_steps=None
        ),
        params={"rate": arguments.lr, "steps": steps},
    )
    # train() returns at once on rank 0, and on no other, if its checkpoint has all the steps.
    saved = tf.train.latest_checkpoint(model_dir) if model_dir else None
    done = int(tf.train.load_variable(saved, "global_step")) if saved else 0
    done = hvd.broadcast_object(done, 0)
    # Variables that rank 0 initialised, or restored from a checkpoint, go to everybody.
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    if done < steps:
        classifier.train(training_batches, max_steps=steps, hooks=hooks)
    elif hvd.rank() != 0:
        hvd.shutdown()
        return []  # rank 0 alone has the model
    found = classifier.evaluate(test_batches)
    if hvd.rank() == 0:
        print(f"test loss: {found['loss']:.4f}")
        print(f"test accuracy: {found['accuracy']:.4f}")
    hvd.shutdown()
    return [classifier.get_variable_value(name) for name in classifier.get_variable_names()]


if __name__ == "__main__":
    main()
