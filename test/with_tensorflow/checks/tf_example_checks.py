"""The examples for TensorFlow, few steps of each, in processes that have it loaded anyway."""

from __future__ import annotations

import tensorflow as tf
import tensorflow2_mnist
import tensorflow_keras_mnist
import tensorflow_mnist
import tensorflow_mnist_estimator
import tensorflow_word2vec
from example_runs import assert_accuracy, expect_accuracy, run

from perseus import basics


def check_a_tape_learns_digits():
    expect_accuracy(tensorflow2_mnist, 0.8, "--epochs", "3")


def check_fit_learns_digits():
    _, printed = run(tensorflow_keras_mnist, "--epochs", "5")
    basics.init()  # the example has ended its world
    assert_accuracy(printed, 0.8)


def check_a_monitored_session_learns_digits():
    expect_accuracy(tensorflow_mnist, 0.8, "--epochs", "3")


def check_an_estimator_learns_digits_or_names_what_does():
    if hasattr(tf, "estimator"):
        expect_accuracy(tensorflow_mnist_estimator, 0.9, "--epochs", "4")
        return
    try:
        run(tensorflow_mnist_estimator)
    except SystemExit as end:
        for text in (tf.__version__, "no tf.estimator", "2.15", "tensorflow_mnist.py"):
            assert text in str(end), end
    else:
        raise AssertionError("trained without tf.estimator")


def check_sparse_gradients_learn_words():
    # Last, as it makes TensorFlow deterministic. Few words, seen often: few steps show something.
    quick = ["--steps", "300", "--batch-size", "512", "--fewest", "30", "--lr", "3"]
    expect_accuracy(tensorflow_word2vec, 0.54, *quick)
