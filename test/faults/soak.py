"""Disturbs an elastic job on virtual hosts at random, and measures what that costs.

    python test/faults/soak.py --faults 300 --seed 7

Eight ranks of four hosts train. In random intervals one of these happens, each equally often: a
rank is killed or stopped, the agent of a host is killed (its ranks end with it), or a host's link
is down for some seconds. Slots that have failed are used again after a second or two. After every
CALM_AFTER faults the job is left alone for CALM_SECONDS: how fast it is then is what the rest is
compared with, since a machine that others use, too, is not equally fast at all times. Then the same
number of steps is trained undisturbed, for its loss. Fails if the job does, if it stands still for
longer than LONGEST seconds after a fault, or if anything is left behind. Needs root, for the hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from perseus.bench.virtual_hosts import VirtualHosts

RANK = Path(__file__).with_name("soak_rank.py")
ROOT = Path(__file__).resolve().parents[2]
HOSTS, SLOTS, LONGEST = 4, 2, 60.0
CALM_AFTER, CALM_SECONDS = 5, 12.0
KINDS = ("kill", "stop", "agent", "link")


@dataclass
class Fault:
    """What was done and when. lost: seconds from the notice to the next step."""

    kind: str
    at: float
    noticed: float = float("nan")
    lost: float = float("nan")


class Soak:
    """One job on the hosts. limit: GLOO_TIMEOUT_SECONDS."""

    def __init__(self, hosts: VirtualHosts, steps: int, limit: int) -> None:
        self.limit = limit
        self.directory = Path(tempfile.mkdtemp(prefix="soak-"))
        self.hosts = hosts
        where = ",".join(f"{name}:{SLOTS}" for name in hosts.names)
        ranks = str(HOSTS * SLOTS)
        command = [sys.executable, "-m", "perseus.run", "-H", where, "-np", ranks, "--min-np", "1"]
        command += ["--blacklist-cooldown-range", "1", "2", "--elastic-timeout", "60"]
        command += [sys.executable, str(RANK), str(self.directory), str(steps)]
        variables = {
            **hosts.environment(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_TIMEOUT_SECONDS": str(limit),
            "TMPDIR": str(self.directory),
            "PERSEUS_LOG_LEVEL": "error",
        }
        self._lines: list[dict[str, Any]] = []
        self._read: dict[Path, int] = {}  # bytes of each file
        self._output = (self.directory / "output").open("w+b")
        self.process = hosts.popen(
            0, command, env=variables, stdout=self._output, stderr=subprocess.STDOUT
        )

    def lines(self) -> list[dict[str, Any]]:
        """All that ranks have written so far, file by file as it is found."""
        for file in self.directory.glob("log.*"):
            if file.stat().st_size == self._read.get(file, 0):
                continue
            with file.open("rb") as opened:
                opened.seek(self._read.get(file, 0))
                whole, end, _ = opened.read().rpartition(b"\n")
            self._read[file] = self._read.get(file, 0) + len(whole) + len(end)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def steps(self) -> list[dict[str, Any]]:
        """The steps, in the order in which they were done."""
        return sorted((line for line in self.lines() if "step" in line), key=_at)

    def text(self) -> str:
        self._output.flush()
        return (self.directory / "output").read_text(encoding="utf-8", errors="replace")

    def expect_end(self) -> None:
        """The job has ended well, and its hosts have nothing of it any more."""
        status = self.process.wait(timeout=LONGEST)
        if status != 0:
            raise SystemExit(f"the job ended with status {status}:\n{self.text()[-4000:]}")
        for host in range(HOSTS):
            left = [line for line in self.hosts.command_lines(host) if str(RANK) in line]
            if left:
                raise SystemExit(f"host{host} still runs {left}")
            shared = self.hosts.run(host, ["ls", "/dev/shm"]).stdout.split()
            if shared:
                raise SystemExit(f"host{host} has {shared} left in /dev/shm")

    def close(self) -> None:
        """End the job; what it has said goes, too, unless it has failed."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=30)
        self._output.close()
        if self.process.returncode == 0:
            shutil.rmtree(self.directory)


def _at(line: dict[str, Any]) -> float:
    return float(line["at"])


def processes(hosts: VirtualHosts, host: int, pattern: str) -> list[int]:
    """The processes of a host whose command lines match, by their numbers there."""
    return [int(pid) for pid in hosts.run(host, ["pgrep", "-f", pattern]).stdout.split()]


def disturb(soak: Soak, fault: str, generator: random.Random) -> float | None:
    """Do it to a random rank or host. Returns when that was; None if there was nobody."""
    hosts = soak.hosts
    host = generator.randrange(1 if fault == "link" else 0, HOSTS)
    if fault == "link":
        at = time.time()
        hosts.set_link(host, False)
        time.sleep(soak.limit + 1 + 2 * generator.random())
        hosts.set_link(host, True)
        return at
    ranks = processes(hosts, host, f"^[^ ]*python[^ ]* {re.escape(str(RANK))}")
    chosen = [str(generator.choice(ranks))] if ranks else []
    if fault == "agent" and chosen:
        chosen = hosts.run(host, ["ps", "-o", "ppid=", "-p", *chosen]).stdout.split()
    number = "-STOP" if fault == "stop" else "-KILL"
    at = time.time()
    done = bool(chosen) and hosts.run(host, ["kill", number, *chosen]).returncode == 0
    return at if done else None


def await_step(soak: Soak, after: float, ranks: int = 1) -> None:
    """Wait until at least so many ranks have done a step together after a moment."""
    deadline = time.time() + LONGEST
    seen = 0
    while time.time() < deadline:
        if soak.process.poll() is not None:
            raise SystemExit(f"the job has ended:\n{soak.text()[-4000:]}")
        lines = soak.lines()
        new = (line for line in lines[seen:] if "step" in line)
        if any(_at(line) > after and line["size"] >= ranks for line in new):
            return
        seen = len(lines)
        time.sleep(0.05)
    raise SystemExit(f"no such step within {LONGEST:g} s:\n{soak.text()[-4000:]}")


def leave_alone(soak: Soak) -> tuple[float, float]:
    """Let all ranks train in peace. Returns from when to when."""
    await_step(soak, time.time(), HOSTS * SLOTS)
    begun = time.time()
    time.sleep(CALM_SECONDS)
    return begun, time.time()


def run(
    soak: Soak, count: int, interval: float, seed: int
) -> tuple[list[Fault], list[tuple[float, float]]]:
    """Return the faults, and when the job was left alone."""
    generator = random.Random(seed)
    faults: list[Fault] = []
    await_step(soak, 0.0)
    calm = [leave_alone(soak)]
    kinds: list[
        str
    ] = []  # the next ones: all kinds equally often, since some cost more than others
    with tqdm(total=count, unit="fault", disable=not sys.stderr.isatty()) as bar:
        while len(faults) < count:
            time.sleep(interval * (0.5 + generator.random()))
            kinds = kinds or generator.sample(KINDS, len(KINDS))
            if (at := disturb(soak, kinds[-1], generator)) is not None:
                faults.append(Fault(kinds.pop(), at))
                await_step(soak, time.time())
                bar.update()
                if len(faults) % CALM_AFTER == 0 or len(faults) == count:
                    calm.append(leave_alone(soak))
    (soak.directory / "stop").touch()
    soak.expect_end()
    return faults, calm


def steps_of_ranks(lines: list[dict[str, Any]], when: list[tuple[float, float]]) -> int:
    """The steps done in these times, each as often as ranks did it."""
    return sum(
        line["size"] for line in lines if any(begin <= _at(line) < end for begin, end in when)
    )


def measure(faults: list[Fault], lines: list[dict[str, Any]]) -> None:
    """Find out when each fault was noticed, and when the next world did its first step."""
    steps = sorted((line for line in lines if "step" in line), key=_at)
    noticed = sorted(line["noticed"] for line in lines if "noticed" in line)
    for index, fault in enumerate(faults):
        end = faults[index + 1].at if index + 1 < len(faults) else float("inf")
        first = next((at for at in noticed if fault.at <= at < end), None)
        if first is None:
            continue
        fault.noticed = first - fault.at
        after = next((line["at"] for line in steps if line["at"] > first), None)
        fault.lost = float("nan") if after is None else after - first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--interval", type=float, default=6.0, help="mean seconds between them")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int, default=1, help="GLOO_TIMEOUT_SECONDS of the job")
    given = parser.parse_args()
    with VirtualHosts(HOSTS, rate="1gbit") as hosts:
        with contextlib.closing(Soak(hosts, 10**9, given.limit)) as soak:
            faults, calm = run(soak, given.faults, given.interval, given.seed)
            disturbed = soak.steps()
            measure(faults, soak.lines())
        with contextlib.closing(Soak(hosts, disturbed[-1]["step"], given.limit)) as other:
            other.process.wait()
            other.expect_end()
            undisturbed = other.steps()
    # Between the first time in peace and the last one, of equal ranks that do a step each.
    begun, ended = calm[0][1], calm[-1][0]
    alone = calm[1:-1]
    rate = steps_of_ranks(disturbed, calm) / sum(end - begin for begin, end in calm)
    seconds = ended - begun - sum(end - begin for begin, end in alone)
    done = steps_of_ranks(disturbed, [(begun, ended)]) - steps_of_ranks(disturbed, alone)
    lost = seconds - done / rate
    other_rate = HOSTS * SLOTS * len(undisturbed) / (undisturbed[-1]["at"] - undisturbed[0]["at"])
    print(f"{len(faults)} faults in {seconds:.0f} s, {disturbed[-1]['step']} steps in all")
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind and fault.lost == fault.lost]
        if own:
            notice, recover = ([getattr(f, name) for f in own] for name in ("noticed", "lost"))
            print(
                f"{kind:6} {len(own):3} noticed after {median(notice):.2f} s (at most "
                f"{max(notice):.2f}), next step {median(recover):.2f} s later (at most "
                f"{max(recover):.2f})"
            )
    print(
        f"throughput kept at one fault a minute: {100 * (1 - lost / len(faults) / 60):.1f} %, in "
        f"this run {100 * (1 - lost / seconds):.1f} %; left alone, ranks do {rate:.0f} steps a "
        f"second in sum, in the undisturbed run {other_rate:.0f}"
    )
    tails = [sum(line["loss"] for line in run[-100:]) / 100 for run in (disturbed, undisturbed)]
    print(f"loss of the last 100 steps: {tails[0]:.5f}, undisturbed {tails[1]:.5f}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PERSEUS_RANK", None)
    sys.exit(main())
