"""How long survivors stand still while a new rank gets their state, against the exchange of a step.

    python benchmarks/sync_bench.py --rate 1gbit --hosts 3 --slots 2

Virtual hosts (root). The state is that of ResNet-50 and the momentum of its 161 parameters, which
`state.sync()` of a TorchState spreads; a step exchanges its gradients exactly. They take turns, and
medians are printed, beside the time that the link needs for the bytes of the state once.
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
    seconds, state_bytes = json.loads(found.partition(MARK)[2])
    limit = 8 * state_bytes / bits_per_second(given.rate)
    print(
        f"{given.hosts} hosts of {given.slots} at {given.rate}: "
        f"state of {state_bytes / 1e6:.0f} MB {seconds['sync']:.2f} s "
        f"(the link's rate allows {limit:.2f} s), "
        f"exchange of a step {seconds['step']:.2f} s"
    )
    return 0


def work() -> None:
    """One rank."""
    import torch

    import perseus.torch as hvd
    from perseus.bench.models import resnet50

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

    seconds: dict[str, list[float]] = {"sync": [], "step": []}
    for _ in range(ROUNDS):
        for name, body in (("sync", state.sync), ("step", step)):
            hvd.barrier()
            begin = time.perf_counter()
            body()
            seconds[name].append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        state_bytes = 2 * sum(4 * parameter.numel() for parameter in parameters)
        print(MARK + json.dumps([medians, state_bytes]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
