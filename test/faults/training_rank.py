"""A rank of the jobs that declared_faults.py disturbs: `python training_rank.py DIRECTORY FRAMEWORK
WHAT RANK STEP`.

It trains on whole numbers with rates that are powers of two, so that all sums are exact and what
the weights must be in the end is known. At STEP, RANK waits until the file `struck` says that the
fault has happened. Writes lines of JSON into DIRECTORY/RANK.notes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DIRECTORY, FRAMEWORK, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
VICTIM, STEP = int(sys.argv[4]), int(sys.argv[5])
RANK, SIZE = int(os.environ["PERSEUS_RANK"]), int(os.environ["PERSEUS_SIZE"])
NOTES = (DIRECTORY / f"{RANK}.notes").open("a", encoding="utf-8", buffering=1)
# With these it is to see that training ends, else what it comes to.
ENDLESS = WHAT in ("launcher-killed", "terminal-gone")
STEPS, WIDTH, RATE = (1 << 30 if ENDLESS else 12), 1024, 2.0**-6
MORE = 1 << 30  # bytes that a rank wants which may have no more memory


class Training(NamedTuple):
    """One step with a batch of one row; the weights; memory of the framework, in bytes."""

    step: Callable[[Any], None]
    weights: Callable[[], Any]
    allocate: Callable[[int], object]


def note(event: str, **facts: Any) -> None:
    NOTES.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")


def row(rank: int, step: int) -> Any:
    return ((np.arange(WIDTH) * 7 + rank * 31 + step * 3) % 257).astype(np.float32)


def expected() -> Any:
    rows = [row(rank, step) for rank in range(SIZE) for step in range(STEPS)]
    return -RATE * np.sum(rows, axis=0, dtype=np.float64) / SIZE


def train_hvd() -> Training:
    import torch

    import perseus.torch.horovod as hvd

    hvd.init()
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), RATE)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(torch.from_numpy(batch)).sum().backward()
        optimizer.step()

    return Training(step, lambda: model.weight.detach().numpy()[0], _torch_bytes)


def _torch_bytes(count: int) -> object:
    import torch

    return torch.ones(count, dtype=torch.uint8)


def train_ddp() -> Training:
    import datetime

    import torch
    import torch.distributed as dist

    import perseus  # noqa: F401  what users write above a script

    limit = datetime.timedelta(seconds=float(os.environ["GLOO_TIMEOUT_SECONDS"]))
    dist.init_process_group("gloo", timeout=limit)
    linear = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    model = torch.nn.parallel.DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(torch.from_numpy(batch)).sum().backward()
        optimizer.step()

    return Training(step, lambda: linear.weight.detach().numpy()[0], _torch_bytes)


def train_tensorflow() -> Training:
    import tensorflow as tf

    import perseus.tensorflow as hvd

    hvd.init()
    weights = tf.Variable(tf.zeros([WIDTH]))
    optimizer = tf.keras.optimizers.SGD(RATE)
    optimizer.build([weights])

    @tf.function
    def learn(batch: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weights * batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights], strict=True))

    return Training(
        lambda batch: learn(tf.constant(batch)),
        weights.numpy,
        lambda count: tf.fill([count], tf.constant(1, tf.uint8)),
    )


def train_mxnet() -> Training:
    import mxnet as mx

    import perseus.mxnet as hvd

    hvd.init()
    parameter = mx.gluon.Parameter("weights", shape=(WIDTH,), init="zeros")
    parameter.initialize()
    trainer = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": RATE})

    def step(batch: Any) -> None:
        data = mx.nd.array(batch)
        with mx.autograd.record():
            loss = (parameter.data() * data).sum()
        loss.backward()
        trainer.step(1)
        parameter.data().wait_to_read()

    def allocate(count: int) -> object:
        array = mx.nd.ones((count,), dtype="uint8")
        array.wait_to_read()
        return array

    return Training(step, lambda: parameter.data().asnumpy(), allocate)


def take_descriptors() -> None:
    """Let this process open no more descriptors than it has."""
    taken = {int(entry) for entry in os.listdir("/proc/self/fd")}
    free = next(number for number in range(1 << 20) if number not in taken)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))


def main() -> None:
    # The launcher ends the others once one has failed: they are to say what they found themselves.
    if not ENDLESS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The clock of the first faults begins now: to import a framework may take longer than they may.
    importlib.import_module({"tensorflow": "tensorflow", "mxnet": "mxnet"}.get(FRAMEWORK, "torch"))
    note("ready", pid=os.getpid())
    if WHAT == "descriptors" and STEP == 0 and RANK == VICTIM:
        take_descriptors()
    begin = {
        "hvd": train_hvd,
        "ddp": train_ddp,
        "tensorflow": train_tensorflow,
        "mxnet": train_mxnet,
    }
    training = begin[FRAMEWORK]()
    note("joined")
    begun = time.time() - time.monotonic()
    for step in range(STEPS):
        if step == STEP > 0 and RANK == VICTIM:
            note("waiting")
            while not (DIRECTORY / "struck").exists():
                time.sleep(0.01)
            if WHAT == "memory":
                training.allocate(MORE)
        training.step(row(RANK, step))
        print(f"step {step} done", "." * 70, flush=True)
        note("step", step=step)
    jump = time.time() - time.monotonic() - begun
    if WHAT.startswith("clock"):
        assert abs(jump) > 7000, "the clock has not jumped"
    right = bool(np.array_equal(training.weights(), expected()))
    note("finished", right=right)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        with contextlib.suppress(OSError, MemoryError):
            note("error", kind=type(error).__name__, text=str(error))
        raise
