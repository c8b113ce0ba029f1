"""Starts ranks by hand, as other launchers would, for the tests named test_rendezvous*."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# Every variable from which some launcher could be recognised.
LAUNCHERS = ("PERSEUS_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC_")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Meets once, builds `worlds` worlds, and prints for each what it found as one line of JSON.
MEET = """
import json, os, sys
from perseus import _core
from perseus.run.bootstrap.identity import identify
from perseus.run.bootstrap.rendezvous import find_store
{before}
me = identify()
place = find_store(me)
for epoch in range({worlds}):
    context = _core.Context(
        rank=me.rank, size=me.size, local_rank=me.local_rank, local_size=me.local_size,
        cross_rank=me.cross_rank, cross_size=me.cross_size, store_host=place.host,
        store_port=place.port, secret=place.secret, epoch=epoch,
    )
    print(json.dumps([context.rank, context.size, context.local_rank, context.local_size,
                      context.cross_rank, context.cross_size, place.host, place.port,
                      place.secret.decode(), me.launcher]), flush=True)
    context.close()
{after}
"""


def script(worlds: int = 1, before: str = "", after: str = "") -> str:
    return MEET.format(worlds=worlds, before=before, after=after)


def environment(**variables: str) -> dict[str, str]:
    """This process's without any trace of a launcher, and `variables`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in TORCH
    }
    return {**kept, "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "250", **variables}


def free_port() -> int:
    """One that nobody gets who asks for any port, until the ranks are up and take it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(first - 10_000, 1024), max(first, 2048))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    environments: list[dict[str, str]], program: str, timeout: float = 300
) -> list[subprocess.CompletedProcess[str]]:
    """Each rank's end, all started at once; none is left behind."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments
    ]
    ends = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=timeout)
            ends.append(subprocess.CompletedProcess(rank.args, rank.returncode, output, errors))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    return ends


def found(end: subprocess.CompletedProcess[str]) -> list[list[Any]]:
    """What a rank that ran `script` printed, a list for each world."""
    assert end.returncode == 0, end.stderr
    return [json.loads(line) for line in end.stdout.splitlines() if line.startswith("[")]
