"""Rank 1 is killed; rank 0 writes which errors it gets.

    perseusrun -np 2 python dying_rank.py FILE WAY...

The first way meets the death, the others come after it. What the launcher sees as rank 1 only waits
for that file: else it would end rank 0, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

FOUND = Path(sys.argv[1])
RANK = int(os.environ["HOROVOD_RANK"])


def main() -> None:
    import tensorflow as tf

    import perseus.tensorflow.horovod.keras as hvd_keras
    from perseus.keras.library import keras
    from perseus.tensorflow import mpi_ops as hvd

    hvd.init()

    def reduce() -> tf.Tensor:
        return hvd._allreduce(tf.fill([1000], hvd.rank() + 1.0), "gradient")

    def in_session() -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(reduce())

    step = tf.function(reduce)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

    def fit() -> None:
        model.fit(tf.ones([8, 4]), tf.ones([8, 2]), verbose=0)

    ways = {"function": step, "session": in_session, "eager": reduce, "fit": fit}
    assert step().numpy().tolist() == [3.0] * 1000
    fit()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lines = []
    for way in sys.argv[2:]:
        try:
            ways[way]()
        except tf.errors.OpError as error:
            assert "lost rank 1" in str(error), error
            lines.append(f"{way} {type(error).__name__}")
    FOUND.with_suffix(".part").write_text("\n".join(lines), encoding="utf-8")
    FOUND.with_suffix(".part").rename(FOUND)


if RANK == 1:
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        until = time.monotonic() + 60
        while not FOUND.exists() and time.monotonic() < until:
            time.sleep(0.05)
        sys.exit(0)
main()
