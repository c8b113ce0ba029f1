"""A rank of an elastic job: rank 1 of three is killed, and a new process takes its place.

perseusrun -np 3 --min-np 2 --blacklist-cooldown-range 1 2 python elastic_rank.py DIRECTORY CODEC

With rotate, a DistributedOptimizer averages weights, which gets its steps key by key.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import perseus.mxnet as hvd

STEPS = 8
killed = Path(sys.argv[1]) / "killed"
rotates = sys.argv[2] == "rotate"

# Codecs act between hosts: each rank is one.
os.environ.update(LIGHT_2D_ALLREDUCE="1", LIGHT_INTRA_SIZE="1")
if rotates:
    os.environ["PERSEUS_DOWNSAMPLE_N_ELEMENTS"] = "2"
hvd.init()
mx.random.seed(10 + hvd.rank())  # sync makes them equal
net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Dense(70, in_units=40),
    gluon.nn.BatchNorm(in_channels=70),
    gluon.nn.Dense(3, in_units=70),
)
net.initialize(mx.init.Xavier())
net.hybridize()
parameters, adam = net.collect_params(), mx.optimizer.Adam(learning_rate=0.01)
if rotates:
    source = hvd.DistributedOptimizer(adam)
    trainer = gluon.Trainer(parameters, source, kvstore=None)
else:
    codec = getattr(hvd.Compression, sys.argv[2])
    source = trainer = hvd.DistributedTrainer(parameters, adam, compression=codec)
state = hvd.elastic.MXNetState(net, trainer, step=0, taken_in=-1)


def rows(step):
    values = np.random.default_rng((hvd.rank(), step)).standard_normal((8, 40))
    return mx.nd.array(values.astype(np.float32))


@hvd.elastic.run
def train(state):
    print(f"enter {hvd.rank()} {hvd.size()} {state.step} {os.getpid()}", flush=True)
    if hvd.size() == 3 and killed.exists():
        state.taken_in = max(state.taken_in, state.step)
    # After the last rank has come, all train for as many steps again.
    while state.step < STEPS or state.taken_in < 0 or state.step < state.taken_in + STEPS:
        with autograd.record():
            loss = (net(rows(state.step)) ** 2).mean()
        loss.backward()
        if state.step == 3 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(8)
        state.step += 1
        state.commit()


train(state)
_, momenta = zip(*sorted(trainer._updaters[0].states.items()), strict=True)
weights = [parameter.data() for parameter in parameters.values() if parameter.grad_req != "null"]
arrays = weights if rotates else [*weights, *(array for pair in momenta for array in pair)]
holds = any(any(values) for _, values in source.residuals().values())
digest = hashlib.sha256(b"".join(array.asnumpy().tobytes() for array in arrays)).hexdigest()
print(
    f"finished {hvd.rank()} {state.step} {trainer._optimizer.num_update} {holds} {digest[:8]}",
    flush=True,
)
hvd.shutdown()
