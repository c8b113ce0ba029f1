"""Training on GPUs: with Perseus, with PyTorch's own backends, and without any exchange.

python benchmarks/gpu_bench.py [--model resnet50|gpt2] [--hosts 2 --rate 10gbit] [WAY ...]

Two ranks train replicas of a model on random data; a WAY says how they exchange gradients:

    none             not at all: what no exchange can beat
    hvd              perseus.torch's DistributedOptimizer
    ddp:perseus      DistributedDataParallel on the backend of Perseus
    ddp:nccl         on NCCL
    ddp:gloo         on gloo

One rank alone (--ranks 1) shows what the optimizer costs where there is nothing to exchange. Ways
take turns in the same processes, each of them first in its turn, with the settings of the
environment; medians of steps. Ranks share GPUs where a host has fewer: NCCL joins such ranks since
2.30, if NCCL_MULTI_RANK_GPU_ENABLE is 1, and then NVIDIA's MPS should serve them, or their kernels
wait for each other's time slices. NCCL serves the first world of a process alone, so hvd and
ddp:perseus cannot be measured together where ranks share a host.
--hosts needs root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import perseus.torch as hvd
from perseus.bench.nets import GPT2, NETS
from perseus.bench.virtual_hosts import VirtualHosts
from perseus.torch.distributed.launched import fill_environment

WARM, TIMED = 3, 10  # steps of a turn
Step = Callable[[], None]


def main() -> int:
    """The exit status: that of the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*NETS, "gpt2"], default="resnet50")
    parser.add_argument("--batch", type=int, default=0, help="of a rank; default: 32, gpt2: 4")
    parser.add_argument("--pixels", type=int, default=224, help="width of images")
    parser.add_argument("--device", default="", help="default: a GPU of the host")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="virtual ones, with equal ranks")
    parser.add_argument("--rate", default="10gbit", help="of the links between virtual hosts")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("ways", nargs="*", default=["none", "hvd"], help="default: none hvd")
    given = parser.parse_args()
    if given.ranks == 1 and any(way.startswith("ddp") for way in given.ways):
        parser.error("one rank has no process group: DDP needs --ranks 2 or more")
    if given.ranks > given.hosts and {"hvd", "ddp:perseus"} <= set(given.ways):
        parser.error("hvd and ddp:perseus: only one of them would have NCCL, so measure them apart")
    if "PERSEUS_RANK" in os.environ:
        work(given)
        return 0
    launch = [sys.executable, "-m", "perseus.run", "-np", str(given.ranks)]
    command = [sys.executable, *sys.argv]
    if given.hosts == 1:
        os.execv(sys.executable, [*launch, *command])
    slots = given.ranks // given.hosts
    with VirtualHosts(given.hosts, given.rate) as hosts:
        names = ",".join(f"host{i}:{slots}" for i in range(given.hosts))
        process = hosts.popen(
            0, [*launch, "-H", names, "--", *command], env={**os.environ, **hosts.environment()}
        )
        return int(process.wait())


def work(given: argparse.Namespace) -> None:
    """What a rank does."""
    if not given.device and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU on this host: --device cpu measures without one")
    device = torch.device(given.device or f"cuda:{rank() % torch.cuda.device_count()}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    steps = {way: made(way, given, device) for way in given.ways}
    found: dict[str, list[float]] = {way: [] for way in given.ways}
    ways = list(steps)
    for turn in range(given.rounds):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            step = steps[way]
            for index in range(WARM + TIMED):
                meet(device)
                begun = time.perf_counter()
                step()
                finish(device)
                if index >= WARM:
                    found[way].append(time.perf_counter() - begun)
    if rank() == 0:
        report(given, device, found)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(given: argparse.Namespace, device: torch.device, found: dict[str, list[float]]) -> None:
    """Print a line for each way."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    link = f", {given.hosts} hosts at {given.rate}" if given.hosts > 1 else ""
    print(f"{given.model}, {given.ranks} ranks of {batch_of(given)} samples, {where}{link}")
    first = statistics.median(next(iter(found.values())))
    for way, seconds in found.items():
        median = statistics.median(seconds)
        speed = batch_of(given) * given.ranks / median
        print(
            f"{median * 1e3:9.2f} ms  {speed:9.1f} samples/s  {first / median:7.1%}  {way}"
            f"  ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})"
        )


def rank() -> int:
    return int(os.environ.get("PERSEUS_RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("PERSEUS_LOCAL_RANK", "0"))


def batch_of(given: argparse.Namespace) -> int:
    default = 4 if given.model == "gpt2" else 32
    return int(given.batch) or default


def meet(device: torch.device) -> None:
    """Begin together, with nothing left to do."""
    finish(device)
    if dist.is_initialized():
        dist.barrier()


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made(way: str, given: argparse.Namespace, device: torch.device) -> Step:
    """A step of training whose gradients are exchanged in this way."""
    if given.ranks > 1 and not dist.is_initialized():
        fill_environment()
        dist.init_process_group("gloo")
    net: Any = (GPT2() if given.model == "gpt2" else NETS[given.model].make()).to(device)
    inputs, targets = samples(given, device)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    kind, _, backend = way.partition(":")
    if kind == "ddp":
        net = DistributedDataParallel(net, process_group=dist.new_group(backend=backend))
    elif way == "hvd":
        if not hvd.is_initialized():
            hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif way != "none":
        raise SystemExit(f"{way}: ways are none, hvd and ddp:BACKEND")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            scores = net(inputs)
        loss = functional.cross_entropy(scores.float().flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()

    return step


def samples(given: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones, and what a model should say of them."""
    count = batch_of(given)
    if given.model == "gpt2":
        tokens = torch.randint(GPT2.words, (count, GPT2.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn(count, 3, given.pixels, given.pixels, device=device)
    return images, torch.randint(1000, (count,), device=device)


if __name__ == "__main__":
    sys.exit(main())
