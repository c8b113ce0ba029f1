"""How long survivors stand still while a new rank gets their state, against the exchange of a step.

    python benchmarks/sync_bench.py --rate 1gbit --hosts 3 --slots 2

Virtual hosts (root). The state is that of ResNet-50 and the momentum of its 161 parameters, which
`state.sync()` of a TorchState spreads; a step exchanges its gradients exactly. Then all but the
last layer is frozen, and the new ranks, which are all but rank 0, have been fed nothing or all of
that. They take turns, and medians are printed, beside the time that the link needs for the bytes of
the state once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "sync-bench "
ROUNDS = 5


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of every host's link")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="ranks of a host")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work()
        return 0
    from perseus.bench.virtual_hosts import VirtualHosts, bits_per_second

    places = ",".join(f"host{host}:{given.slots}" for host in range(given.hosts))
    start = [sys.executable, "-m", "perseus.run", "-np", str(given.hosts * given.slots)]
    command = [*start, "-H", places, sys.executable, __file__, "--worker"]
    with VirtualHosts(given.hosts, rate=given.rate) as hosts:
        variables = {**hosts.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = hosts.run(0, command, env=variables, timeout=600)
    found = next((line for line in done.stdout.splitlines() if MARK in line), None)
    if found is None:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    seconds, *sizes = json.loads(found.partition(MARK)[2])
    rate = bits_per_second(given.rate)
    whole, tuned = (
        f"{size / 1e6:.0f} MB (the link's rate allows {8 * size / rate:.2f} s)" for size in sizes
    )
    print(
        f"{given.hosts} hosts of {given.slots} at {given.rate}: "
        f"state of {whole} {seconds['sync']:.2f} s, exchange of a step {seconds['step']:.2f} s; "
        f"with one layer trained, state of {tuned} {seconds['tuned']:.2f} s, after it was fed "
        f"{seconds['fed']:.2f} s"
    )
    return 0


def work() -> None:
    """One rank."""
    import torch

    import perseus.torch as hvd
    from perseus import _core
    from perseus.bench.models import resnet50
    from perseus.elastic import known_blocks
    from perseus.feeding import BLOCK, blocks_of
    from perseus.torch.functions import plain_buffers

    hvd.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.rand(shape)) for _, shape in resnet50()]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = hvd.elastic.TorchState(model, optimizer)

    def step() -> None:
        gradients = [parameter.grad for parameter in parameters]
        hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="gradients"))

    last = next(i for i, parameter in enumerate(parameters) if parameter.dim() == 2)
    tuner = torch.optim.SGD([parameters[last]], lr=0.1, momentum=0.9)
    tuner.step()
    tuned = hvd.elastic.TorchState(model, tuner)
    state.sync()
    frozen = [each for each in parameters if each is not parameters[last]]
    blocks = [bytes(block) for view in plain_buffers(frozen) for block in blocks_of(view)]
    known = {_core.hash_blocks(block, BLOCK): block for block in blocks} if hvd.rank() > 0 else {}

    def fed() -> None:
        with known_blocks.used(known):
            tuned.sync()

    bodies = {"sync": state.sync, "step": step, "tuned": tuned.sync, "fed": fed}
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(ROUNDS):
        for name, body in bodies.items():
            if hvd.rank() > 0:  # a new rank has other values
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.add_(1.0)
            hvd.barrier()
            begin = time.perf_counter()
            body()
            seconds[name].append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        bytes_of_all = sum(4 * parameter.numel() for parameter in parameters)
        of_tuned = bytes_of_all + 4 * parameters[last].numel()
        print(MARK + json.dumps([medians, 2 * bytes_of_all, of_tuned]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
