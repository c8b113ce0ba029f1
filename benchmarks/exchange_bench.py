"""What exchanging a model's gradients costs in each framework, against PyTorch.

python benchmarks/exchange_bench.py [--rounds 5] [--steps 60] [SIZES ...]

SIZES: resnet50 (161 tensors, 98 MiB) or small (160 tensors, 18 MiB); default: both. 2 ranks of this
host. A step computes gradients by the framework's own differentiation and has the framework's own
optimizer or tape average them, or, every other time, one number only: so the ranks wait for each
other in both, and the difference of the medians is what exchanging gradients costs, not that one
rank has computed longer than the other.
Frameworks take turns, each in processes of its own, with the environments that `make test` makes
(.venv/torch, .venv/tensorflow, .venv/mxnet); the ratio is the median of those of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("resnet50", "small")
FRAMEWORKS = ("torch", "tensorflow", "mxnet")
MARK = "exchange-bench "
WARM = 15  # steps; the tuner settles, too

Shapes = list[tuple[int, ...]]
Step = Callable[[bool], None]


def shapes_of(sizes: str) -> Shapes:
    """Of the parameters, in the order of the layers."""
    if sizes == "small":
        return [(64,)] * 60 + [(64, 64, 3, 3)] * 20 + [(256, 64)] * 60 + [(512, 289)] * 20
    from perseus.bench.models import resnet50

    return [shape for _, shape in resnet50()]


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each framework")
    parser.add_argument("--steps", type=int, default=60, help="of a turn, with and without")
    parser.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    parser.add_argument("sizes", nargs="*", choices=SIZES, help="default: both")
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.sizes[0], given.steps)
        return 0
    there = [name for name in FRAMEWORKS if (ROOT / ".venv" / name).exists()]
    for sizes in given.sizes or SIZES:
        times: dict[str, list[float]] = {name: [] for name in there}
        for _ in range(given.rounds):
            for name in there:
                times[name].append(turn(name, sizes, given.steps))
        for name, found in times.items():
            ratios = [mine / torch for mine, torch in zip(found, times["torch"], strict=True)]
            print(
                f"{sizes:9} {name:11} {statistics.median(found):7.2f} ms  "
                f"{statistics.median(ratios):5.2f} x torch   "
                f"{' '.join(f'{each:.1f}' for each in found)}",
                flush=True,
            )
    return 0


def turn(framework: str, sizes: str, steps: int) -> float:
    """Milliseconds of one framework's exchange."""
    python = str(ROOT / ".venv" / framework / "bin" / "python")
    worker = [python, __file__, "--worker", framework, "--steps", str(steps), sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [python, "-m", "perseus.run", "-np", "2", "--", *worker],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if MARK in line:
            return float(json.loads(line.partition(MARK)[2]))
    raise SystemExit(f"{framework} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def work(framework: str, sizes: str, steps: int) -> None:
    """One rank."""
    step, rank = {"torch": torch_step, "tensorflow": tensorflow_step, "mxnet": mxnet_step}[
        framework
    ](shapes_of(sizes))
    for _ in range(WARM):
        step(True)
        step(False)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(steps):
        for exchanges, found in seconds.items():
            begin = time.perf_counter()
            step(exchanges)
            found.append(time.perf_counter() - begin)
    if rank == 0:
        cost = statistics.median(seconds[True]) - statistics.median(seconds[False])
        print(MARK + json.dumps(1e3 * cost), flush=True)


def torch_step(shapes: Shapes) -> tuple[Step, int]:
    """Gradients of a sum of dot products; a DistributedOptimizer's hooks and synchronize()."""
    import torch

    import perseus.torch.horovod as hvd

    hvd.init()
    torch.set_num_threads(1)
    weights = [torch.nn.Parameter(torch.rand(shape)) for shape in shapes]
    alone = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    factors = [torch.rand(weight.numel()) for weight in weights]
    number = torch.zeros(1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.0),
        named_parameters=[(f"w{i}", weight) for i, weight in enumerate(weights)],
    )

    def step(exchanges: bool) -> None:
        used = weights if exchanges else alone
        for weight in used:
            weight.grad = None
        products = [w.view(-1).dot(f) for w, f in zip(used, factors, strict=True)]
        torch.stack(products).sum().backward()
        if exchanges:
            optimizer.synchronize()
        else:
            hvd.allreduce_(number, name="number")

    return step, hvd.rank()


def tensorflow_step(shapes: Shapes) -> tuple[Step, int]:
    """The same in a tf.function, by a tape and a DistributedGradientTape."""
    import tensorflow as tf

    import perseus.tensorflow.horovod as hvd

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    weights = [tf.Variable(tf.random.uniform(shape)) for shape in shapes]
    factors = [tf.Variable(tf.random.uniform((weight.shape.num_elements(),))) for weight in weights]

    def gradients(tape: Any) -> list[Any]:
        with tape:
            flat = [tf.reshape(weight, (-1,)) for weight in weights]
            loss = tf.add_n([tf.tensordot(w, f, 1) for w, f in zip(flat, factors, strict=True)])
        found: list[Any] = tape.gradient(loss, weights)
        return found

    def alone() -> list[Any]:
        found = gradients(tf.GradientTape())
        with tf.control_dependencies(found):
            return [*found, hvd.allreduce(tf.zeros([1]), name="number")]

    functions = {
        True: tf.function(lambda: gradients(hvd.DistributedGradientTape(tf.GradientTape()))),
        False: tf.function(alone),
    }

    def step(exchanges: bool) -> None:
        functions[exchanges]()

    return step, hvd.rank()


def mxnet_step(shapes: Shapes) -> tuple[Step, int]:
    """The same by autograd and a DistributedTrainer."""
    import mxnet as mx

    import perseus.mxnet as hvd

    hvd.init()
    weights = [mx.gluon.Parameter(f"w{i}", shape=shape) for i, shape in enumerate(shapes)]
    for weight in weights:
        weight.initialize(mx.init.Uniform())
    factors = [mx.nd.random.uniform(shape=(weight.data().size,)) for weight in weights]
    number = mx.nd.zeros((1,))
    trainer = hvd.DistributedTrainer(weights, "sgd", {"learning_rate": 0.0})

    def step(exchanges: bool) -> None:
        with mx.autograd.record():
            flat = [weight.data().reshape(-1) for weight in weights]
            loss = mx.nd.add_n(*[mx.nd.dot(w, f) for w, f in zip(flat, factors, strict=True)])
        loss.backward()
        if exchanges:
            trainer.allreduce_grads()
        else:
            mx.nd.waitall()
            hvd.allreduce_(number, name="number")
        mx.nd.waitall()

    return step, hvd.rank()


if __name__ == "__main__":
    sys.exit(main())
