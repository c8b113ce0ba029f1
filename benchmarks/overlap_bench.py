"""How much of a model's communication hides behind its backward pass, setting by setting.

python benchmarks/overlap_bench.py [--model resnet50] [--rate 1gbit] [--rounds 3] [SETTING ...]

A SETTING is NAME=VALUE[,NAME=VALUE...] of docs/config.md; default: the defaults, and exact. Two
virtual hosts (root) run a rank each, which hands over gradients at the moments in which a real
backward pass made them and sleeps in between: communication has the cores to itself, so what a step
takes beyond the backward pass is communication alone. Settings take turns; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch

import perseus.torch.horovod as hvd
from perseus.bench.nets import BATCH, CLASSES, NETS
from perseus.bench.virtual_hosts import VirtualHosts

_WARM, _TIMED = 2, 3  # steps of a turn


def main() -> int:
    """The exit status: that of the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=NETS, default="resnet50")
    parser.add_argument("--rate", default="1gbit", help="of the link between the hosts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each setting")
    parser.add_argument("settings", nargs="*", default=["", "PERSEUS_ALLREDUCE_DTYPE=1"])
    given = parser.parse_args()
    if "PERSEUS_RANK" in os.environ:
        _work(given)
        return 0
    with VirtualHosts(2, given.rate) as hosts:
        launcher = [sys.executable, "-m", "perseus.run", "-np", "2", "-H", "host0,host1", "--"]
        environment = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
        process = hosts.popen(0, [*launcher, sys.executable, *sys.argv], env=environment)
        return int(process.wait())


def _work(given: argparse.Namespace) -> None:
    hvd.init()
    net = NETS[given.model]
    parameters = list(net.make().parameters())
    length, moments = hvd.broadcast_object(
        _moments(given.model) if hvd.rank() == 0 else None, name="moments"
    )
    first = hvd.rank() == 0
    hvd.shutdown()
    gradients = [torch.randn_like(p) * 1e-3 for p in parameters]
    beyond: dict[str, list[float]] = {setting: [] for setting in given.settings}
    for _ in range(given.rounds):
        for setting, seconds in beyond.items():
            seconds.extend(_turn(setting, parameters, gradients, length, moments))
    if not first:
        return
    print(f"{given.model}: beyond a backward pass of {length * 1e3:.0f} ms at {given.rate}")
    for setting, seconds in beyond.items():
        print(f"{statistics.median(seconds) * 1e3:8.1f} ms  {setting or 'defaults'}")


def _moments(model: str) -> tuple[float, list[tuple[float, int]]]:
    """Length of a backward pass in s, and when which parameter's gradient was there."""
    net = NETS[model]
    module = net.make()
    times: list[tuple[float, int]] = []
    begun = 0.0
    for index, parameter in enumerate(module.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: times.append((time.perf_counter() - begun, index))
        )
    passes = []
    for _ in range(3):
        images = torch.randn(BATCH, 3, net.pixels, net.pixels)
        labels = torch.randint(CLASSES, (BATCH,))
        loss = torch.nn.functional.cross_entropy(module(images), labels)
        times.clear()
        begun = time.perf_counter()
        loss.backward()
        passes.append((time.perf_counter() - begun, list(times)))
    return min(passes)


def _turn(
    setting: str,
    parameters: list[torch.nn.Parameter],
    gradients: list[torch.Tensor],
    length: float,
    moments: list[tuple[float, int]],
) -> list[float]:
    """Seconds beyond the backward pass, of the slower rank, step by step."""
    variables = dict(pair.split("=", 1) for pair in setting.split(",") if pair)
    os.environ.update({"HOROVOD_AUTOTUNE": "0", **variables})
    hvd.init()
    named = [(str(i), p) for i, p in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named)
    found = []
    for step in range(_WARM + _TIMED):
        optimizer.zero_grad()
        hvd.barrier()
        begun = time.perf_counter()
        for moment, index in moments:
            time.sleep(max(0.0, begun + moment - time.perf_counter()))
            torch.autograd.backward(parameters[index], gradients[index])
        time.sleep(max(0.0, begun + length - time.perf_counter()))
        optimizer.synchronize()
        took = torch.tensor([time.perf_counter() - begun - length], dtype=torch.float64)
        slower = hvd.allreduce(took, op=hvd.Max, name="took").item()
        if step >= _WARM:
            found.append(slower)
    hvd.shutdown()
    for name in variables:
        del os.environ[name]
    return found


if __name__ == "__main__":
    sys.exit(main())
