"""The examples for MXNet, few steps of each, in processes that have it loaded anyway."""

from __future__ import annotations

import mxnet_mnist
import mxnet_module_fit
from example_runs import expect_accuracy


def check_a_trainer_learns_digits():
    expect_accuracy(mxnet_mnist, 0.8, "--epochs", "3")


def check_a_module_learns_digits():
    expect_accuracy(mxnet_module_fit, 0.9, "--epochs", "6")
