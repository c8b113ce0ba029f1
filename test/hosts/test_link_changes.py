"""auto notices that the links between hosts have become faster or slower, and loses nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

pytest.importorskip("torch")

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

# Trains until the links have changed to what the test makes of them, twice, and then flushes.
_RANK = """
import os, sys, time
import torch
import perseus.torch.horovod as hvd
from perseus import basics, control
from torch import nn
asks = sys.argv[1]
hvd.init()
shapes = {"matrix": (64, 64), "vector": (1024,)}
sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(parameters.values(), lr=0.0), named_parameters=parameters.items(), op=hvd.Sum)
given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
got = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
generator = torch.Generator().manual_seed(hvd.rank())
def train():
    optimizer.zero_grad()
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator)
        given[name] += gradient
        (parameter * gradient).sum().backward()
    optimizer.step()
    for name, parameter in parameters.items():
        got[name] += parameter.grad
def chosen():
    speeds = basics.speeds()
    return tuple(speeds.choose(size) for size in sizes.values())
def train_until(changed):
    for step in range(10_000):
        train()
        # Ranks measure at one place, but may ask at different times whether they have.
        if step % 4 == 3 and len(set(control.gather_lines(str(chosen()), "chosen"))) == 1:
            if changed():
                return
        time.sleep(0.02)
    raise AssertionError("the links have not been measured again")
def ask(what):
    if hvd.rank() == 0:
        open(asks, "w").write(what)
# Other processes may make a fast link look slow in some measurements, but no slow one fast.
train_until(lambda: True)
slow = chosen()
ask("2gbit")
train_until(lambda: chosen() != slow)
fast = chosen()
for _ in range(4):
    train()  # with what is chosen now; the first of these flushes
ask("10mbit")
train_until(lambda: chosen() == slow)
for _ in range(4):
    train()
basics.flush_residuals()
train()
assert basics.speeds().measurement >= 3
for name in shapes:
    exact = hvd.allreduce(given[name], op=hvd.Sum, name="exact." + name)
    error = float((got[name] - exact).abs().max())
    assert error < 1e-2, (name, error)
print("slow", slow, "fast", fast, flush=True)
"""


_INTERFACES = """
import os
import torch
import perseus.torch.horovod as hvd
from perseus import basics
took = []
for streams in "18":
    os.environ["PERSEUS_ALLREDUCE_STREAMS"] = streams
    hvd.init()
    hvd.allreduce(torch.ones(1000), name="x", compression=hvd.Compression.auto)
    took.append(basics.speeds().seconds_per_byte)
    hvd.shutdown()
assert took[1] < took[0] / 2, took  # an eighth, but other processes may disturb a measurement
"""


def test_links_that_are_used_at_once_count_together() -> None:
    with VirtualHosts(2, rate="200mbit", links=8) as hosts:
        command = [sys.executable, "-m", "perseus.run", "-np", "2", "-H", "host0,host1"]
        command += ["--network-interface", ",".join(f"eth{i}" for i in range(8))]
        command += [sys.executable, "-c", _INTERFACES]
        environment = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
        result = hosts.run(0, command, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr


def test_choices_follow_the_links(tmp_path: Path) -> None:
    program, asks = tmp_path / "rank.py", tmp_path / "asks"
    program.write_text(_RANK)
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "-H", "host0,host1"]
    command += [sys.executable, str(program), str(asks)]
    with VirtualHosts(2, rate="10mbit") as hosts:
        settings = {
            "PERSEUS_ALLREDUCE_CODEC": "auto",
            "PERSEUS_LINK_CHECK_SECONDS": "1",
            "OMP_NUM_THREADS": "1",
        }
        job = hosts.popen(
            0, command, env={**hosts.environment(), **settings}, stdout=-1, stderr=-2, text=True
        )
        late = time.monotonic() + 120
        while job.poll() is None and time.monotonic() < late:
            if asks.exists() and (rate := asks.read_text()):
                hosts.set_rate(rate)
                asks.unlink()
            time.sleep(0.05)
        if job.poll() is None:
            job.terminate()
        output, _ = job.communicate(timeout=30)
    assert job.returncode == 0, output
    assert output.count("slow") == 2, output
