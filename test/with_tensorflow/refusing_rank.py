"""Rank 1 gives a wrong argument, a ValueError of Python's, while rank 0 waits for its gradients.

    perseusrun -np 2 python refusing_rank.py WAY [FILE]

Without a file rank 1 ends by its exception. With one rank 0 writes there what it is told, and then
how it ends; rank 1 ends when rank 0 has been warned of it, while another process keeps its place:
else the launcher would end rank 0, too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

WAY = sys.argv[1]
FILE = Path(sys.argv[2]) if len(sys.argv) > 2 else None
RANK = int(os.environ["HOROVOD_RANK"])


def main() -> None:
    import tensorflow as tf

    import perseus.tensorflow.horovod as hvd
    import perseus.tensorflow.horovod.keras as hvd_keras
    from perseus.keras.library import keras

    hvd.init()
    weights = tf.Variable(tf.fill([1000], hvd.rank() + 1.0))

    def eager() -> None:
        splits = tf.constant([500, 500], tf.int64 if RANK else tf.int32)
        hvd.alltoall(weights, splits, name="waited_for")

    @tf.function
    def function() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * weights)
        tape = hvd.DistributedGradientTape(tape, groups=[weights] if RANK else None)
        return tape.gradient(loss, [weights])[0]

    def fit() -> None:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        passes = 0 if RANK else 1
        optimizer = keras.optimizers.SGD(0.1)
        optimizer = hvd_keras.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
        model.compile(optimizer, "mse")
        model.fit(tf.ones([8, 4]), tf.ones([8, 2]), verbose=0)

    step = {"eager": eager, "function": function, "fit": fit}[WAY]
    if FILE is None:
        step()
    elif RANK == 0:
        os.dup2(os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        try:
            step()
        except tf.errors.UnknownError as error:
            os.write(2, f"ended by: {error}\nthe end\n".encode())
    else:
        try:
            step()
        except ValueError:
            _until("Missing ranks")
            raise


def _until(words: str) -> None:
    until = time.monotonic() + 120
    while not (FILE.exists() and words in FILE.read_text()) and time.monotonic() < until:
        time.sleep(0.05)


if RANK == 1 and FILE is not None:
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        _until("the end")
        sys.exit(0)
main()
