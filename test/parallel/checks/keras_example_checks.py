"""The example for Keras on PyTorch."""

from __future__ import annotations

import keras_torch_mnist
from example_runs import expect_accuracy


def check_keras_on_pytorch_learns_digits():
    expect_accuracy(keras_torch_mnist, 0.95, "--epochs", "6")
