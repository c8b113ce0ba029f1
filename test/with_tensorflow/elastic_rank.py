"""A rank of an elastic job: rank 1 of three is killed, and a new process takes its place.

perseusrun -np 3 --min-np 2 --blacklist-cooldown-range 1 2 python elastic_rank.py DIRECTORY
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import tensorflow as tf

import perseus.tensorflow as hvd

STEPS = 8
killed = Path(sys.argv[1]) / "killed"

hvd.init()
tf.keras.utils.set_random_seed(10 + hvd.rank())  # sync makes them equal
model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
model.build((None, 4))
optimizer = tf.keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0, taken_in=-1)


@hvd.elastic.run
def train(state):
    print(f"enter {hvd.rank()} {hvd.size()} {state.step} {os.getpid()}", flush=True)
    if hvd.size() == 3 and killed.exists():
        state.taken_in = max(state.taken_in, state.step)
    # After the last rank has come, all train for as many steps again.
    while state.step < STEPS or state.taken_in < 0 or state.step < state.taken_in + STEPS:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            rows = tf.random.stateless_normal((8, 4), (hvd.rank(), state.step))
            loss = tf.reduce_mean(model(rows) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        state.step += 1
        if state.step == 4 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()


train(state)
variables = [*model.variables, *optimizer.variables]
digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in variables)).hexdigest()
print(f"finished {hvd.rank()} {state.step} {digest[:8]}", flush=True)
hvd.shutdown()
