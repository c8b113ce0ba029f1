"""Rank 1 is killed while rank 0 has all kinds of exchanges under way; it writes what raised.

    perseusrun -np 2 python dying_rank.py FILE

What the launcher sees as rank 1 only waits for that file: else it would end rank 0, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

FOUND = Path(sys.argv[1])
WAITING = FOUND.with_suffix(".waiting")  # made by rank 0 once all is under way
RANK = int(os.environ["HOROVOD_RANK"])


def until_there(path: Path) -> None:
    until = time.monotonic() + 200
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def main() -> None:
    import mxnet as mx

    import perseus.mxnet as hvd

    hvd.init()
    array = mx.nd.full((1000,), hvd.rank() + 1.0)
    hvd.allreduce_(array, op=hvd.Sum, name="gradient")
    assert array.asnumpy().tolist() == [3.0] * 1000
    kv = hvd.create()
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    kv.init(["weight", "value"], [mx.nd.zeros((7,)), mx.nd.zeros((7,))])
    parameter = mx.gluon.Parameter("p", shape=(6, 5))
    parameter.initialize()
    trainer = hvd.DistributedTrainer(
        [parameter], "sgd", compression=hvd.Compression.rotate(2), prefix="turns."
    )
    layers = [hvd.PerseusSyncBatchNorm(comm_scope=1, in_channels=3) for _ in range(2)]
    for layer in layers:
        layer.initialize()
    batch = mx.nd.array([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]]) * (hvd.rank() + 1)
    batch.attach_grad()
    with mx.autograd.record():
        normal = layers[0](batch)
    normal.wait_to_read()
    if RANK == 1:
        until_there(WAITING)
        os.kill(os.getpid(), signal.SIGKILL)
    waits = {}
    normal.backward()
    waits["backward"] = batch.grad.wait_to_read
    with mx.autograd.record():
        output = layers[1](batch) * 2
    waits["forward"] = output.wait_to_read
    hvd.allreduce_(array, name="gradient")
    array *= 2
    waits["allreduce"] = array.wait_to_read
    kv.push("weight", mx.nd.ones((7,)))
    outs = [mx.nd.zeros((7,)) for _ in range(2)]
    kv.pull("weight", outs[0])
    waits["pull"] = outs[0].wait_to_read
    kv.pushpull("value", mx.nd.ones((7,)), out=outs[1])
    waits["pushpull"] = outs[1].wait_to_read
    with mx.autograd.record():
        loss = parameter.data().sum()
    loss.backward()
    trainer.step(1)
    waits["turn"] = parameter.data().wait_to_read
    WAITING.touch()
    waits["allgather"] = lambda: hvd.allgather(mx.nd.ones((3,)), "gathered")
    kv.init("later", mx.nd.zeros((3,)))
    waits["init"] = lambda: kv.pull("later", outs[0][:3]) or outs[0].wait_to_read()
    lines = []
    for what, wait in waits.items():
        try:
            wait()
        except mx.base.MXNetError as error:
            assert "lost rank 1" in str(error), error
            lines.append(what)
        else:
            lines.append(f"no error: {what}")
    FOUND.with_suffix(".part").write_text("\n".join(lines), encoding="utf-8")
    FOUND.with_suffix(".part").rename(FOUND)


if RANK == 1:
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        until_there(FOUND)
        sys.exit(0)
main()
